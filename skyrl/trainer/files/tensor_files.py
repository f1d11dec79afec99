"""Safetensors files: those of a base model, read as if none were quantized, and those that are read and written in
pieces, so that no tensor must be in memory as a whole.

The files of a base model are found, and checked to be complete. Files are read, and not mapped: what has been read
takes no memory, and a file that changes later changes no weight. Knows the format: a length, a JSON header, and the
tensors' bytes. Knows nothing of a model's layers, of adapters or of ranks.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import safe_open
from transformers.utils.hub import cached_file

from skyrl.base.config.server import ConfigError
from skyrl.trainer.files.config import LOADING_ERRORS, cannot_load, one_line
from skyrl.trainer.quantized.format import Format
from skyrl.trainer.quantized.weights import QuantizedSlice

ONE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
PLAIN = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "BOOL": torch.bool,
}
"""Dtypes of tensors that can be read as they are, by their names in a file; the last two are those of buffers."""


def weight_files(path: str) -> list[Path]:
    """The model's safetensors files, in a directory or downloaded from the hub; none if it has none.

    Raises ConfigError if a file is missing that the index names."""
    if (one := _find(path, ONE_FILE)) is not None:
        return [one]
    if (index := _find(path, INDEX)) is None:
        return []
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise cannot_load(path, f"{INDEX} has no weight_map: {one_line(error)}") from None
    found = [_find(path, name) for name in names]
    if missing := [name for name, file in zip(names, found, strict=True) if file is None]:
        others = f" and {len(missing) - 1} others" if len(missing) > 1 else ""
        raise cannot_load(path, f"{missing[0]}{others} of the weight_map of {INDEX} is missing")
    return [file for file in found if file is not None]


def _find(path: str, name: str) -> Path | None:
    try:
        file = cached_file(path, name, _raise_exceptions_for_missing_entries=False)
    except LOADING_ERRORS as error:
        raise cannot_load(path, one_line(error)) from error
    return None if file is None else Path(file)


class _Files:
    """Files that are open until `close`, or the end of a `with`."""

    def __init__(self) -> None:
        self._opened = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()


class StoredWeights(_Files):
    """All tensors of a model's files, with the names that they have in a release that is not quantized.

    Has the methods of one opened file of safetensors. Close it after the last tensor."""

    def __init__(
        self, path: str, files: Sequence[Path], form: Format | None, dtype: torch.dtype, *, keep_quantized: bool = False
    ) -> None:
        """`dtype`: that of the weights that are quantized in the files. `keep_quantized`: such a weight becomes a
        `QuantizedWeight` where all of it is read.

        Raises ConfigError: a file is damaged or shorter than its header says, or a tensor is stored in another way than
        `form`, the format that config.json states."""
        self._path = path
        self._keep_quantized = keep_quantized
        self._readers: dict[str, Any] = {}
        self._quantized: dict[str, QuantizedSlice] = {}
        super().__init__()
        try:
            for file in files:
                reader = self._open(file)
                self._readers |= dict.fromkeys(reader.keys(), reader)
            self._group(form, dtype)
        except BaseException:
            self._opened.close()
            raise

    def keys(self) -> list[str]:
        return [*self._readers, *self._quantized]

    def get_slice(self, name: str) -> Any:
        """An object that gives the tensor's shape, dtype and rows."""
        return self._quantized[name] if name in self._quantized else self._readers[name].get_slice(name)

    def _open(self, file: Path) -> Any:
        try:
            return self._opened.enter_context(safe_open(file, framework="pt", backend="pread"))
        except OSError as error:
            raise cannot_load(self._path, f"{file.name}: {one_line(error)}") from error
        except LOADING_ERRORS as error:
            raise cannot_load(self._path, f"{file.name} is damaged: {one_line(error)}") from None

    def _group(self, form: Format | None, dtype: torch.dtype) -> None:
        """Put the stored tensors together that make a weight, and check the dtypes of all."""
        dtypes = {name: reader.get_slice(name).get_dtype() for name, reader in self._readers.items()}
        if form is not None:
            factors = form.suffixes[1]
            for stem in [name.removesuffix(factors) for name in dtypes if name.endswith(factors)]:
                self._join(form, stem, dtypes, dtype)
        for name in self._readers:
            if dtypes[name] not in PLAIN:
                said = "has no" if form is None else "describes another format in"
                raise cannot_load(
                    self._path, f"the files hold {name} as {dtypes[name]}, and config.json {said} quantization_config"
                )

    def _join(self, form: Format, stem: str, dtypes: dict[str, str], dtype: torch.dtype) -> None:
        names = [f"{stem}{suffix}" for suffix in form.suffixes]
        if absent := [name for name in names if name not in dtypes]:
            raise cannot_load(self._path, f"the files lack {absent[0]}, which belongs to {form.name(stem)}")
        for name, known in zip(names, form.dtypes, strict=True):
            if dtypes[name] not in known:
                raise cannot_load(
                    self._path, f"the files hold {name} as {dtypes[name]}, and the trainer reads {' or '.join(known)}"
                )
        parts = [self._readers.pop(name).get_slice(name) for name in names]
        weight = QuantizedSlice(form, form.name(stem), parts, dtype, self._keep_quantized)
        try:
            weight.get_shape()
        except ValueError as error:
            raise cannot_load(self._path, f"{weight.name}: {error}") from None
        self._quantized[weight.name] = weight


_NAMES = {dtype: name for name, dtype in PLAIN.items()} | {torch.int32: "I32"}
_ALIGNMENT = 8
Shapes = Mapping[str, tuple[int, ...]]
AT_ONCE = 2**22
"""Elements that are computed or copied at a time, or one row: 16 MiB in float32."""


def check_new(out: Path) -> None:
    """Raises ConfigError for a directory that holds files; OSError."""
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"{out} is not empty")


def row_parts(shape: Sequence[int]) -> Iterator[slice]:
    """A tensor's rows in parts of at most AT_ONCE elements, or one row."""
    step = max(1, AT_ONCE // max(1, math.prod(shape[1:])))
    for start in range(0, shape[0], step):
        yield slice(start, min(start + step, shape[0]))


class TensorFiles(_Files):
    """Writes safetensors files in pieces of any order. Close it after the last piece."""

    def __init__(
        self,
        directory: Path,
        files: Mapping[str, Shapes],
        dtypes: Mapping[str, torch.dtype] | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        """`files`: the shapes of each file's tensors. `dtypes`: those of all tensors; None: all are float32. Makes the
        files with their headers. Raises OSError."""
        self._places: dict[str, tuple[int, int, int]] = {}
        """By tensor: the descriptor of its file, where it begins in the file, and the size of an element."""
        super().__init__()
        for name, shapes in files.items():
            offset = 0
            header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
            of = {key: torch.float32 if dtypes is None else dtypes[key] for key in shapes}
            for key in sorted(shapes, key=lambda key: (-of[key].itemsize, key)):  # so every offset is aligned
                end = offset + math.prod(shapes[key]) * of[key].itemsize
                header[key] = {"dtype": _NAMES[of[key]], "shape": shapes[key], "data_offsets": [offset, end]}
                offset = end
            encoded = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
            encoded += b" " * (-len(encoded) % _ALIGNMENT)
            file = self._opened.enter_context((directory / name).open("wb"))
            file.write(struct.pack("<Q", len(encoded)) + encoded)
            file.flush()
            start = file.tell()
            os.truncate(file.fileno(), start + offset)
            for key in shapes:
                self._places[key] = file.fileno(), start + header[key]["data_offsets"][0], of[key].itemsize

    def write(self, key: str, begin: int, values: npt.NDArray[Any]) -> None:
        """Write elements of a tensor, from its element `begin` on. `values`: the elements' bytes, contiguous, of any
        dtype. Raises OSError."""
        descriptor, start, itemsize = self._places[key]
        rest = values.reshape(-1).view(np.uint8).data
        offset = start + begin * itemsize
        while len(rest):
            written = os.pwrite(descriptor, rest, offset)
            rest, offset = rest[written:], offset + written


def write_file(file: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """Write contiguous tensors of the CPU to one file, without mapping it. Raises OSError, also on a full tmpfs."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
    with TensorFiles(file.parent, {file.name: shapes}, dtypes, metadata) as written:
        for name, tensor in tensors.items():
            written.write(name, 0, tensor.view(torch.uint8).numpy())


@contextmanager
def sharded_files(
    directory: Path,
    described: Mapping[str, torch.Tensor],
    shard: int | str,
    totals: Mapping[str, int] | None = None,
) -> Iterator[TensorFiles]:
    """The weights of a model as transformers saves them: files of at most `shard` (bytes, or a text such as "4GB"), or
    one tensor, and their index if there are several. `described`: a tensor on the device "meta" for each name; `totals`
    stand in the index beside the number of bytes. Raises OSError."""
    split = split_torch_state_dict_into_shards(
        dict(described), filename_pattern="model{suffix}.safetensors", max_shard_size=shard
    )
    files = {
        file: {name: tuple(described[name].shape) for name in names}
        for file, names in split.filename_to_tensors.items()
    }
    dtypes = {name: tensor.dtype for name, tensor in described.items()}
    with TensorFiles(directory, files, dtypes, {"format": "pt"}) as tensors:
        yield tensors
    if split.is_sharded:
        index = {"metadata": {**(totals or {}), **split.metadata}, "weight_map": split.tensor_to_filename}
        (directory / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


class StoredTensors(_Files):
    """Reads float32 tensors of safetensors files in pieces. Close it after the last piece."""

    def __init__(self, files: Iterable[Path], expected: Shapes, others: Collection[str] = ()) -> None:
        """Raises ValueError unless the files have exactly the `expected` tensors, and perhaps some of the `others`;
        OSError or SafetensorError when files are missing or damaged."""
        self._places: dict[str, tuple[int, int]] = {}
        found: dict[str, tuple[int, ...]] = {}
        super().__init__()
        try:
            for path in files:
                with safe_open(path, framework="np"):  # checks the header, and the length of the file
                    pass
                file = self._opened.enter_context(path.open("rb"))
                (length,) = struct.unpack("<Q", file.read(8))
                header: dict[str, Any] = json.loads(file.read(length))
                header.pop("__metadata__", None)
                for key, entry in header.items():
                    if key in others:
                        continue
                    if entry["dtype"] != "F32":
                        raise ValueError(f"{path}: {key} is stored as {entry['dtype']}, not as F32")
                    self._places[key] = file.fileno(), 8 + length + entry["data_offsets"][0]
                    found[key] = tuple(entry["shape"])
            if different := sorted(key for key in found.keys() | expected if found.get(key) != expected.get(key)):
                raise ValueError(f"the files do not hold the tensors of this model: {', '.join(different[:4])}")
        except BaseException:
            self._opened.close()
            raise

    def read(self, key: str, begin: int, into: npt.NDArray[np.float32]) -> None:
        """Fill a flat array from a tensor's element `begin` on. Raises OSError."""
        descriptor, start = self._places[key]
        rest = into.view(np.uint8).data
        offset = start + begin * 4
        while len(rest):
            count = os.preadv(descriptor, [rest], offset)
            if not count:
                raise OSError(f"the file with {key} has become shorter")
            rest, offset = rest[count:], offset + count
