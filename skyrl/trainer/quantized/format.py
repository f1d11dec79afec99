"""The formats of quantized releases that the trainer reads: block FP8, MXFP4, and integers of 4 or 8 bits that
compressed-tensors has packed.

Each class names the stored tensors that make one weight, and computes the weight from them, in parts that bound the
memory. Knows config.json's `quantization_config` and numbers. Knows nothing of files or of models' layers.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

PART = 2**18
"""Elements that are computed at a time: 1 MiB in float32. With 16 MiB, the allocator kept up to 0.4 GB."""
PART_ON_GPU = 2**24
"""The same on a GPU, where each part starts about eight kernels. 64 MiB in float32, three or four times."""
_E4M3 = tuple(torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).tolist())
_E8M0 = tuple(torch.arange(256, dtype=torch.uint8).view(torch.float8_e8m0fnu).tolist())
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The values of E2M1 by their four bits (OCP Microscaling Formats 1.0, section 5.3.3)."""
_FP4_PAIRS = tuple((_FP4[byte & 15], _FP4[byte >> 4]) for byte in range(256))
_INTEGERS = {
    4: tuple((float((byte & 15) - 8), float((byte >> 4) - 8)) for byte in range(256)),
    8: tuple(float(byte - 128) for byte in range(256)),
}
"""By their bits. Two of 4 bits in a byte: the lower bits first. The bytes of an int32 come lowest first, too."""


# transformers 5.19 can dequantize while it loads, and is not used: it reads a matrix of 192 rows in FP8 blocks of 128
# as two blocks of 96 (wrong numbers without a word), and MXFP4 as bfloat16 into a float32 model. Its four threads read
# ahead: 3.97 GB for a model of 2.23 GB, and 2.71 GB one at a time.
class Format(ABC):
    """How a release stores its quantized weights."""

    suffixes: ClassVar[tuple[str, ...]]
    """What the names of the stored tensors of one weight end with: first its numbers, then their factors."""
    dtypes: ClassVar[tuple[tuple[str, ...], ...]]
    """The dtypes that each of them may have, as safetensors names them."""

    @abstractmethod
    def name(self, stem: str) -> str:
        """The name that the weight has in a release that is not quantized. `stem`: a stored name without suffix."""

    @abstractmethod
    def shape(self, parts: Sequence[Any]) -> list[int]:
        """The weight's shape. `parts`: the stored tensors, as objects that give their shape and slices.

        Raises ValueError if they do not fit together."""

    def read(self, parts: Sequence[Any], rows: range, dtype: torch.dtype) -> Tensor:
        """These rows of the weight: computed in float32, and rounded once to `dtype`. `parts`: as for `shape`."""
        return self.compute(parts[0], parts[1], self.shape(parts), rows, dtype)

    @abstractmethod
    def compute(self, numbers: Any, factors: Any, shape: Sequence[int], rows: range, dtype: torch.dtype) -> Tensor:
        """As `read`, of a weight of this `shape`, or of equal weights in a stack [weights, *shape]. numbers, factors:
        stored tensors, of files or on a device, where the rows are computed."""


@dataclass(frozen=True)
class BlockFp8(Format):
    """E4M3 numbers, and a factor for each block of `rows` x `columns` of the last two dimensions. The last block of a
    dimension may be cut (DeepSeek's `kv_a_proj_with_mqa` has 576 rows, and blocks of 128)."""

    rows: int
    columns: int
    suffixes = ("", "_scale_inv")
    dtypes = (("F8_E4M3",), ("F32", "BF16", "F16"))

    def name(self, stem: str) -> str:
        return stem

    def shape(self, parts: Sequence[Any]) -> list[int]:
        weight, scale = (list(part.get_shape()) for part in parts)
        grid = [*weight[:-2], -(-weight[-2] // self.rows), -(-weight[-1] // self.columns)] if len(weight) > 1 else []
        if len(weight) not in (2, 3) or scale != grid:
            raise ValueError(f"blocks of {self.rows} x {self.columns} of {weight} have factors {grid}, not {scale}")
        return weight

    def compute(self, numbers: Any, factors: Any, shape: Sequence[int], rows: range, dtype: torch.dtype) -> Tensor:
        out = torch.empty(len(rows), *shape[1:], dtype=dtype, device=_device(numbers))
        if len(shape) == 2:
            self._fill(out, numbers, factors, rows)
            return out
        for part in _parts(rows, math.prod(shape[1:]), out.device):
            chosen, place = slice(part.start, part.stop), part.start - rows.start
            of_numbers, of_factors = numbers[chosen], factors[chosen]
            if len(part) == 1:
                self._fill(out[place], of_numbers[0], of_factors[0], range(shape[1]))
            else:
                out[place : place + len(part)] = self._products(of_numbers, of_factors, 0)
        return out

    def _fill(self, out: Tensor, numbers: Any, factors: Any, rows: range) -> None:
        """Compute these rows of a matrix."""
        for part in _parts(rows, out.shape[1], out.device):
            above, place = part.start // self.rows, part.start - rows.start
            of_part = factors[above : (part.stop - 1) // self.rows + 1]
            skipped = part.start - above * self.rows
            out[place : place + len(part)] = self._products(numbers[part.start : part.stop], of_part, skipped)

    def _products(self, numbers: Tensor, factors: Tensor, skipped: int) -> Tensor:
        """The numbers [..., rows, columns] times the factors of their blocks, float32. `skipped`: rows of the first
        block that come before the numbers."""
        rows, columns = numbers.shape[-2:]
        wide = factors.float().repeat_interleave(self.rows, -2)[..., skipped : skipped + rows, :]
        return _looked_up(_E4M3, numbers).mul_(wide.repeat_interleave(self.columns, -1)[..., :columns])


@dataclass(frozen=True)
class Mxfp4(Format):
    """gpt-oss: the experts' weights as E2M1 numbers, two in a byte and 32 in a block, with a power of two for each
    block. The files hold [experts, out, in]; transformers multiplies by [experts, in, out]."""

    suffixes = ("_blocks", "_scales")
    dtypes = (("U8",), ("U8",))

    def name(self, stem: str) -> str:
        return stem

    def shape(self, parts: Sequence[Any]) -> list[int]:
        blocks, scales = (list(part.get_shape()) for part in parts)
        if len(blocks) != 4 or blocks[-1] != 16 or scales != blocks[:-1]:
            raise ValueError(f"blocks {blocks} and powers {scales} do not fit together")
        return [blocks[0], blocks[2] * 32, blocks[1]]

    def compute(self, numbers: Any, factors: Any, shape: Sequence[int], rows: range, dtype: torch.dtype) -> Tensor:
        out = torch.empty(len(rows), *shape[1:], dtype=dtype, device=_device(numbers))
        width, height = shape[1:]
        for part in _parts(rows, width * height, out.device):
            chosen, place = slice(part.start, part.stop), part.start - rows.start
            bytes_of, power_of, of_experts = numbers[chosen], factors[chosen], out[place : place + len(part)]
            for part_rows in _parts(range(height), width * len(part), out.device):
                some = slice(part_rows.start, part_rows.stop)
                values = _looked_up(_FP4_PAIRS, bytes_of[:, some])
                values = values.mul_(_looked_up(_E8M0, power_of[:, some])[..., None])
                of_experts[:, :, some] = values.view(len(part), -1, width).transpose(1, 2)
        return out


@dataclass(frozen=True)
class PackedInt(Format):
    """compressed-tensors' `pack-quantized`: integers of 4 or 8 bits in an int32, the lowest bits first, and a factor
    for each group of columns of a row. An integer is stored with half of its range added: 0 for -8 or -128.

    `group_sizes`: how many columns a group may have; 0 for all of the row. `widths`: how many bits an integer may
    have."""

    group_sizes: tuple[int, ...]
    widths: tuple[int, ...] = (4,)
    suffixes = (".weight_packed", ".weight_scale", ".weight_shape")
    dtypes = (("I32",), ("F32", "BF16", "F16"), ("I64", "I32"))

    def name(self, stem: str) -> str:
        return f"{stem}.weight"

    def shape(self, parts: Sequence[Any]) -> list[int]:
        packed, scale, stated = (list(part.get_shape()) for part in parts)
        shape: list[int] = parts[2][:].tolist() if stated == [2] else []
        grids = (
            [
                [rows, columns // (size or columns)]
                for rows, columns in [shape]
                for size in self.group_sizes
                if columns % (size or columns) == 0
            ]
            if shape
            else []
        )
        if (
            not shape
            or packed not in [[shape[0], -(-shape[1] * bits // 32)] for bits in self.widths]
            or (scale not in grids)
        ):
            raise ValueError(
                f"packed numbers {packed} and factors {scale} do not make {shape} in groups of {self.group_sizes}"
            )
        return shape

    def compute(self, numbers: Any, factors: Any, shape: Sequence[int], rows: range, dtype: torch.dtype) -> Tensor:
        width = shape[-1]
        if len(shape) == 3:
            chosen = slice(rows.start, rows.stop)
            flat = range(len(rows) * shape[1])
            made = self.compute(numbers[chosen].flatten(0, 1), factors[chosen].flatten(0, 1), shape[1:], flat, dtype)
            return made.view(len(rows), *shape[1:])
        out = torch.empty(len(rows), width, dtype=dtype, device=_device(numbers))
        for part in _parts(rows, width, out.device):
            packed, of_groups = numbers[part.start : part.stop], factors[part.start : part.stop].float()
            bits = next(bits for bits in self.widths if packed.shape[1] == -(-width * bits // 32))
            integers = _looked_up(_INTEGERS[bits], packed)[:, :width].reshape(*of_groups.shape, -1)
            values = integers.mul_(of_groups[..., None])
            out[part.start - rows.start : part.stop - rows.start] = values.view(len(part), width)
        return out


def format_of(described: Mapping[str, Any], model_type: str) -> Format:
    """The format that a `quantization_config` describes. `model_type`: that of the text model.

    Raises ValueError for another one: the sentence begins with the field."""
    match described.get("quant_method"):
        case "fp8":
            return _block_fp8(described)
        case "mxfp4":
            if model_type != "gpt_oss":
                raise ValueError(f"quant_method is mxfp4, which is known of gpt_oss alone, and not of {model_type}")
            return Mxfp4()
        case "compressed-tensors":
            return _packed_int(described)
        case other:
            raise ValueError(f"quant_method is {other!r}, and the trainer reads fp8, mxfp4 and compressed-tensors")


def _block_fp8(described: Mapping[str, Any]) -> Format:
    block = described.get("weight_block_size")
    if not isinstance(block, list) or len(block) != 2 or not all(isinstance(n, int) and n > 0 for n in block):
        raise ValueError(f"weight_block_size is {block!r}, and the trainer reads FP8 with blocks [rows, columns]")
    _demand(described, {"fmt": ("e4m3", None), "activation_scheme": ("dynamic", None)})
    return BlockFp8(*block)


def _packed_int(described: Mapping[str, Any]) -> Format:
    packed = "pack-quantized"
    _demand(
        described,
        {
            "format": (packed,),
            "quantization_status": ("compressed", None),
            "kv_cache_scheme": (None,),
            "sparsity_config": (None, {}),
            "transform_config": (None, {}),
        },
    )
    sizes: set[int] = set()
    widths: set[int] = set()
    groups = described.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise ValueError("config_groups is empty")
    for name, group in groups.items():
        field = f"config_groups.{name}"
        _demand(group, {"format": (packed, None), "input_activations": (None,), "output_activations": (None,)}, field)
        weights = group.get("weights") or {}
        _demand(
            weights,
            {
                "num_bits": (4, 8),
                "type": ("int",),
                "symmetric": (True,),
                "strategy": ("group", "channel"),
                "dynamic": (False, None),
                "actorder": (None, False, "weight", "static"),  # other orders store which group a column is in
            },
            f"{field}.weights",
        )
        size = weights.get("group_size") if weights["strategy"] == "group" else 0
        if not isinstance(size, int) or size < 0:
            raise ValueError(f"{field}.weights.group_size is {size!r}, and the trainer reads a number of columns")
        sizes.add(size)
        widths.add(weights["num_bits"])
    return PackedInt(tuple(sorted(sizes)), tuple(sorted(widths)))


def _demand(described: Mapping[str, Any], fields: Mapping[str, tuple[Any, ...]], prefix: str = "") -> None:
    """Raise ValueError unless each field has one of its values; None stands for a field that is absent too."""
    for field, values in fields.items():
        if (found := described.get(field)) not in values:
            name = f"{prefix}.{field}" if prefix else field
            readable = " or ".join(repr(value) for value in values if value is not None) or "none"
            raise ValueError(f"{name} is {found!r}, and the trainer reads {readable}")


def _device(stored: Any) -> torch.device:
    """Where slices of a stored tensor are: those of files are read into main memory."""
    return stored.device if isinstance(stored, Tensor) else torch.device("cpu")


def _looked_up(values: tuple[Any, ...], stored: Tensor) -> Tensor:
    """What each byte of `stored` stands for, float32 [..., bytes], or twice as many where it stands for a pair. On a
    CPU a table takes a sixth of the time of torch's conversion from FP8."""
    table = _table(values, stored.device)
    found = table.index_select(0, stored.contiguous().view(torch.uint8).int().view(-1))
    return found.view(torch.float32).view(*stored.shape[:-1], -1)


@functools.lru_cache(maxsize=16)
def _table(values: tuple[Any, ...], device: torch.device) -> Tensor:
    """Kept, because a copy to a GPU waits for the GPU. A pair is one int64 with the bits of both."""
    table = torch.tensor(values, dtype=torch.float32)
    return (table if table.ndim == 1 else table.view(torch.int64).view(-1)).to(device)


def _parts(rows: range, width: int, device: torch.device) -> Iterator[range]:
    """`rows` in ranges of at most PART elements, or one row."""
    step = max(1, (PART if device.type == "cpu" else PART_ON_GPU) // max(1, width))
    for start in range(rows.start, rows.stop, step):
        yield range(start, min(start + step, rows.stop))
