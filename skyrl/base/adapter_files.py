"""A LoRA adapter's files in PEFT's format: what they must hold to fit a base model, read without torch.

`check_adapter` is the check of every adapter that comes from outside: uploads, and loads of files without a training
state. A matrix without a place in the base model would be ignored without a word by whoever loads the adapter. Knows
names, shapes and bytes. Does not know which layers a base model has: the trainer tells (`Target`).

On experts, PEFT's files have one pair of matrices for each expert, or one for all experts of a layer. Where a release
has gate and up in one tensor of all experts, PEFT trains that tensor itself (`target_parameters`), and vLLM reads what
PEFT writes: for the experts `<experts>`, the pair of `gate_up_proj` as `<experts>.base_layer`, and the pair of
`down_proj` as `<experts>`, because one wraps the other. lora_A is [experts * rank, inputs] with the expert first,
lora_B [outputs, rank * experts] with the rank first. Elsewhere a pair is `<experts>.<number>.<projection>`.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyrl.base.types.weights import LoraSpec

if TYPE_CHECKING:  # importing numpy takes longer than `skyrl --help` may
    import numpy as np
    import numpy.typing as npt

PEFT_JSON, PEFT_TENSORS = "adapter_config.json", "adapter_model.safetensors"
PEFT_PREFIX, PEFT_SUFFIX = "base_model.model.", ".weight"
MAX_CONFIG_BYTES = 2**20
TRAIN_FLAGS = ("train_attn", "train_mlp", "train_unembed")
"""The fields of a LoraSpec that say which layers are trained."""


def with_flags(spec: LoraSpec, flags: Collection[str]) -> LoraSpec:
    """The adapter that trains the layers of these TRAIN_FLAGS alone."""
    return replace(spec, **{flag: flag in flags for flag in TRAIN_FLAGS})


@dataclass(frozen=True)
class Target:
    """A linear layer that adapters may train: its module name in the base model and its sizes. With `experts`, so many
    layers of these sizes, one for each expert: `<module of the experts>.<projection>`."""

    name: str
    in_features: int
    out_features: int
    experts: int | None = None


_BEFORE_LAYER = re.compile(r"^.*\blayers\.\d+\.")


def kind_of(target: str) -> str:
    """The kind of a layer: its module name without the numbers of layers, as `self_attn.q_proj`, `lm_head`."""
    return _BEFORE_LAYER.sub("", target)


def kinds_of(targets: Iterable[Target]) -> list[str]:
    """The kinds of these layers, each once, in the order in which they first come."""
    return list(dict.fromkeys(kind_of(target.name) for target in targets))


class DoesNotFit(ValueError):
    """An adapter's files that cannot be used with this base model. The message names the file and what is wrong."""


FUSED = "gate_up_proj"
FUSED_NAMES = {FUSED: ".base_layer", "down_proj": ""}


def fused_experts(targets: Iterable[Target]) -> frozenset[str]:
    """The modules of experts, by name, whose adapter has one pair for gate and up."""
    found = (target.name.rpartition(".") for target in targets if target.experts is not None)
    return frozenset(module for module, _, leaf in found if leaf == FUSED)


def file_shapes(targets: Sequence[Target], rank: int) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor of an adapter's file, by its name there."""
    fused = fused_experts(targets)
    shapes: dict[str, tuple[int, ...]] = {}
    for target in targets:
        for layer, together in _layers_in_file(target, fused):
            name = f"{PEFT_PREFIX}{layer}"
            shapes[f"{name}.lora_A{PEFT_SUFFIX}"] = (together * rank, target.in_features)
            shapes[f"{name}.lora_B{PEFT_SUFFIX}"] = (target.out_features, rank * together)
    return shapes


def _layers_in_file(target: Target, fused: frozenset[str]) -> Iterator[tuple[str, int]]:
    """The layers' names in a file, each with the number of experts whose matrices are together."""
    if target.experts is None:
        yield target.name, 1
        return
    module, _, leaf = target.name.rpartition(".")
    if module in fused:
        yield f"{module}{FUSED_NAMES[leaf]}", target.experts
        return
    for number in range(target.experts):
        yield f"{module}.{number}.{leaf}", 1


_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
_ALL_ONES = {"F32": 0x7F80_0000, "F16": 0x7C00, "BF16": 0x7F80}
"""The bits of the exponent, by dtype. A number whose exponent has all of them is infinite or none."""
_NAME_BYTES = 400
"""More than any tensor takes in a header: its name, dtype, shape and place."""
_PIECE = 2**20


def most_bytes(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """The most bytes of a file with these tensors."""
    return 4 * sum(map(math.prod, shapes.values())) + _most_header_bytes(shapes)


def _most_header_bytes(shapes: Mapping[str, tuple[int, ...]]) -> int:
    return 2**16 + _NAME_BYTES * len(shapes)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a safetensors file; `start` and `end` are bytes from the beginning of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def header_of(file: Path, most: int) -> tuple[int, dict[str, tuple[str, tuple[int, ...], tuple[int, ...]]]]:
    """The byte at which the numbers of a safetensors file begin, and of each tensor its dtype, shape and place: two
    bytes from there. Looks at no dtype and no place. Raises DoesNotFit for a file that has no header of at most `most`
    bytes."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if not 2 <= length <= min(most, size - 8):
            raise DoesNotFit(f"{file.name} is no safetensors file, or is incomplete: its header has {length} bytes")
        header = stream.read(length)
    try:
        described = json.loads(header)
        described.pop("__metadata__", None)
        return 8 + length, {
            name: (str(one["dtype"]), tuple(map(int, one["shape"])), tuple(map(int, one["data_offsets"])))
            for name, one in described.items()
        }
    except (AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
        raise DoesNotFit(f"{file.name} is no safetensors file: its header cannot be read") from error


def _read_header(file: Path, most: int) -> dict[str, StoredTensor]:
    """The tensors of an adapter's file, in their order. Raises DoesNotFit for a file that is none."""
    size = file.stat().st_size
    first, described = header_of(file, most)
    at = 0
    found: dict[str, StoredTensor] = {}
    for name, (dtype, shape, place) in sorted(described.items(), key=lambda each: each[1][2]):
        if dtype not in _BYTES:
            raise DoesNotFit(f"{PEFT_TENSORS}: {name} is {dtype}; allowed are {', '.join(_BYTES)}")
        end = at + _BYTES[dtype] * math.prod(shape)
        if place != (at, end) or any(each < 1 for each in shape):
            raise DoesNotFit(f"{PEFT_TENSORS}: the bytes of {name} do not fit to its shape {list(shape)}")
        found[name] = StoredTensor(dtype, shape, first + at, first + end)
        at = end
    if first + at != size:
        raise DoesNotFit(f"{PEFT_TENSORS} has {size} bytes, and its header describes {first + at}: it is incomplete")
    return found


@dataclass(frozen=True)
class Described:
    """What adapter_config.json says. The update of a layer is `alpha / rank` * B A."""

    rank: int
    alpha: float


_NEUTRAL = frozenset(
    {
        *("peft_type", "task_type", "auto_mapping", "base_model_name_or_path", "revision", "inference_mode"),
        *("peft_version", "r", "lora_alpha", "lora_dropout", "target_modules", "target_parameters", "bias"),
        *("init_lora_weights", "layers_to_transform", "layers_pattern", "exclude_modules", "megatron_core"),
    }
)
"""The keys that change nothing of what an adapter computes, whatever they say, and those that are checked. Of all other
keys of PEFT, a value changes it (`use_dora`, `use_rslora`, `rank_pattern`, `modules_to_save`...)."""
_PLAIN_STARTS = (True, False, "gaussian")
"""Ways to draw the first weights. PEFT's others (PiSSA, OLoRA, LoftQ) also change the base model's weights."""


def read_config(directory: Path) -> Described:
    """Raises DoesNotFit unless adapter_config.json describes an adapter that is B A times a factor, and no more."""
    try:
        described: Any = json.loads((directory / PEFT_JSON).read_bytes())
    except FileNotFoundError as error:
        raise DoesNotFit(f"there is no {PEFT_JSON}") from error
    except (ValueError, RecursionError) as error:
        raise DoesNotFit(f"{PEFT_JSON} is no JSON") from error
    if not isinstance(described, dict) or described.get("peft_type") != "LORA":
        raise DoesNotFit(f"{PEFT_JSON} describes no LoRA adapter (peft_type must be LORA)")
    if unknown := sorted(key for key, value in described.items() if value and key not in _NEUTRAL):
        raise DoesNotFit(f"{PEFT_JSON} sets {unknown[0]}, which this server does not compute")
    modules = described.get("target_modules")
    if not modules or not (isinstance(modules, str) or all(isinstance(each, str) for each in modules)):
        raise DoesNotFit(f"{PEFT_JSON}: target_modules must name modules: without it no program loads the adapter")
    if described.get("bias", "none") != "none":
        raise DoesNotFit(f"{PEFT_JSON} has a bias; allowed is none")
    if described.get("init_lora_weights", True) not in _PLAIN_STARTS:
        raise DoesNotFit(f"{PEFT_JSON}: init_lora_weights changes the base model's weights; convert the adapter first")
    rank, alpha = described.get("r"), described.get("lora_alpha")
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise DoesNotFit(f"{PEFT_JSON}: r must be a whole number above 0")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not (0 < alpha < 1e6):
        raise DoesNotFit(f"{PEFT_JSON}: lora_alpha must be a number above 0 and below 1e6")
    return Described(rank, float(alpha))


def check_adapter(directory: Path, targets: Sequence[Target], rank: int) -> Described:
    """Raise DoesNotFit unless the files of `directory` are an adapter of this rank on exactly these layers, and all its
    numbers are finite. Reads the whole file, a piece at a time."""
    described = read_config(directory)
    if described.rank != rank:
        raise DoesNotFit(f"{PEFT_JSON} has r {described.rank}, and lora_config.rank is {rank}")
    file, expected = directory / PEFT_TENSORS, file_shapes(targets, rank)
    if not file.is_file():
        raise DoesNotFit(f"there is no {PEFT_TENSORS}")
    stored = _read_header(file, _most_header_bytes(expected))
    _check_names(stored, expected)
    for name, shape in expected.items():
        if stored[name].shape != shape:
            raise DoesNotFit(f"{PEFT_TENSORS}: {name} is {list(stored[name].shape)}, and must be {list(shape)}")
    for name, tensor in stored.items():
        _check_finite(file, name, tensor)
    return described


_OTHER_CLASS = "language_model."
"""In the names of a model that sees, before those of its text model."""


def _check_names(stored: Mapping[str, StoredTensor], expected: Mapping[str, tuple[int, ...]]) -> None:
    if foreign := sorted(stored.keys() - expected.keys()):
        wanted = next(iter(expected))
        hint = ""
        if any(name.replace(_OTHER_CLASS, "") in expected or _of_text(expected, name) for name in foreign):
            hint = f"; rename the tensors: here they are named as in {wanted}"
        raise DoesNotFit(
            f"{PEFT_TENSORS} has {foreign[0]}, for which the base model has no layer that this lora_config trains{hint}"
        )
    if lacking := sorted(expected.keys() - stored.keys()):
        raise DoesNotFit(f"{PEFT_TENSORS} lacks {lacking[0]}, which this lora_config trains")


def _of_text(expected: Mapping[str, tuple[int, ...]], name: str) -> bool:
    return any(each.replace(_OTHER_CLASS, "") == name for each in expected)


MOST_HEADER_BYTES = 2**26


def layers_key(directory: Path) -> str:
    """The same text for all adapters with the same layers and shapes. Raises OSError and DoesNotFit."""
    stored = _read_header(directory / PEFT_TENSORS, MOST_HEADER_BYTES)
    named = json.dumps(sorted((name, each.shape) for name, each in stored.items()))
    return hashlib.blake2b(named.encode(), digest_size=16).hexdigest()


def largest_b(directory: Path) -> float:
    """The largest root mean square of a lora_B; 0 for an adapter that changes nothing. Raises OSError, DoesNotFit."""
    import numpy as np

    file, largest = directory / PEFT_TENSORS, 0.0
    for name, tensor in _read_header(file, MOST_HEADER_BYTES).items():
        if name.endswith(f".lora_B{PEFT_SUFFIX}"):
            squares = sum(float(np.square(part, dtype=np.float64).sum()) for part in _values(file, tensor))
            largest = max(largest, math.sqrt(squares / math.prod(tensor.shape)))
    return largest


def _values(file: Path, tensor: StoredTensor) -> Iterator[npt.NDArray[np.float32]]:
    for bits in _bits(file, tensor):
        if tensor.dtype == "BF16":
            yield (bits.astype("<u4") << 16).view("<f4")
        else:
            yield bits.view(f"<f{_BYTES[tensor.dtype]}").astype("<f4")


def _bits(file: Path, tensor: StoredTensor) -> Iterator[npt.NDArray[np.unsignedinteger[Any]]]:
    """A tensor's numbers as their bits, a piece at a time."""
    import numpy as np

    kind = np.dtype(f"<u{_BYTES[tensor.dtype]}")
    for start in range(tensor.start, tensor.end, _PIECE):
        size = min(_PIECE, tensor.end - start)
        yield np.fromfile(file, kind, size // kind.itemsize, offset=start)


def _check_finite(file: Path, name: str, tensor: StoredTensor) -> None:
    mask = _ALL_ONES[tensor.dtype]
    for bits in _bits(file, tensor):
        if bool(((bits & mask) == mask).any()):
            raise DoesNotFit(f"{PEFT_TENSORS}: {name} holds numbers that are not finite")


def encode_targets(groups: Mapping[str, Sequence[Target]]) -> str:
    """The layers that adapters train under each of TRAIN_FLAGS, as text."""
    rows = {flag: [[t.name, t.in_features, t.out_features, t.experts] for t in of] for flag, of in groups.items()}
    return json.dumps(rows, separators=(",", ":"))


def decode_targets(text: str, spec: LoraSpec) -> list[Target]:
    """Of the text of `encode_targets`, the layers that an adapter of this spec trains."""
    groups = json.loads(text)
    return [Target(*row) for flag in TRAIN_FLAGS if getattr(spec, flag) for row in groups[flag]]
