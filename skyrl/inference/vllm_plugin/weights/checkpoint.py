"""Checkpoints in safetensors files, read with plain reads, and versions of the weights that files change.

The safetensors library maps files into memory. A file that is cut off while it is mapped ends the process that reads
it, and here that is vLLM. `apply_changes` applies files with what differs to an earlier version whose bytes were kept.
"""

from __future__ import annotations

import json
import math
import operator
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch

from skyrl.inference.vllm_plugin.weights.jobs import WeightsError
from skyrl.inference.vllm_plugin.weights.staging import Needed, Staged
from skyrl.weights.deltas import POSITIONS, VALUES, patch
from skyrl.weights.tensors import digest

MAX_HEADER_BYTES = 100 * 2**20
READ_BYTES = 16 * 2**20
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a tensor is: `begin` and `end` are bytes of `file`."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


def entries(directory: Path) -> dict[str, Entry]:
    """All tensors of a checkpoint, by name, from the headers of its files. Raises WeightsError for a directory that is
    not a whole safetensors checkpoint."""
    try:
        files = _files(directory)
        found: dict[str, Entry] = {}
        for file in files:
            for name, entry in entries_of(file):
                if name in found:
                    raise WeightsError(f"{file.name}: {name} is also in {found[name].file.name}")
                found[name] = entry
    except OSError as error:
        raise WeightsError(f"{directory}: {error.strerror or error}") from error
    return found


def tensors(
    found: dict[str, Entry], stopped: Callable[[], bool], empty: Callable[..., torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Read the tensors into memory that `empty(shape, dtype=)` gives, in the order of the files. Ends early once
    `stopped()` is true. Raises WeightsError when a file is gone or shorter than its header says."""
    for file in dict.fromkeys(entry.file for entry in found.values()):
        try:
            with open(file, "rb", buffering=0) as stream:
                for name, entry in found.items():
                    if entry.file == file:
                        if stopped():
                            return
                        yield name, _read(stream, name, entry, empty(entry.shape, dtype=entry.dtype))
        except OSError as error:
            raise WeightsError(f"{file}: {error.strerror or error}") from error


def _files(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
            outside = [name for name in names if Path(name).name != name]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise WeightsError(f"{index} is not an index of safetensors files: {error!r}") from error
        if outside:
            raise WeightsError(f"{index} names a file outside its directory: {outside[0]}")
        if missing := [name for name in names if not (directory / name).is_file()]:
            raise WeightsError(f"{directory}: {missing[0]} is missing")
        return [directory / name for name in names]
    if not directory.is_dir():
        raise WeightsError(f"model_path: {directory} is not a directory on the worker's machine")
    files = sorted(file for file in directory.glob("*.safetensors") if file.is_file())  # a pipe would block for ever
    if not files:
        raise WeightsError(f"{directory} has no safetensors files")
    return files


def entries_of(file: Path) -> Iterator[tuple[str, Entry]]:
    """The tensors of one file, from its header. Raises WeightsError and OSError."""
    size = file.stat().st_size
    with open(file, "rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
            raise WeightsError(f"{file} is not a safetensors file, or it is cut off")
        raw = stream.read(length)
    try:
        header: dict[str, Any] = json.loads(raw)
        header.pop("__metadata__", None)
        for name, given in header.items():
            begin, end = map(operator.index, given["data_offsets"])
            shape = tuple(map(operator.index, given["shape"]))
            if given["dtype"] not in _DTYPES:
                raise WeightsError(f"{file}: {name} has the dtype {given['dtype']}, which is not offered")
            dtype = _DTYPES[given["dtype"]]
            if begin < 0 or min(shape, default=0) < 0 or end - begin != math.prod(shape) * dtype.itemsize:
                raise WeightsError(f"{file}: the size of {name} does not fit its shape")
            if 8 + length + end > size:
                raise WeightsError(f"{file} is cut off: {name} ends at byte {8 + length + end}, the file at {size}")
            yield name, Entry(file, dtype, shape, 8 + length + begin, 8 + length + end)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise WeightsError(f"{file} is not a safetensors file: {error!r}") from error


def _read(stream: BinaryIO, name: str, entry: Entry, tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.numel():
        return tensor
    target = memoryview(cast(Any, tensor.reshape(-1).view(torch.uint8).numpy()))
    position = 0
    while position < len(target):
        got = os.preadv(stream.fileno(), [target[position : position + READ_BYTES]], entry.begin + position)
        if got == 0:
            raise WeightsError(f"{entry.file} became shorter while {name} was read")
        position += got
    return tensor


def apply_changes(
    staged: Staged,
    found: Mapping[str, Entry],
    needed: Needed,
    checksums: Mapping[str, str],
    stopped: Callable[[], bool],
    in_model: Callable[[torch.Tensor], bool],
) -> None:
    """Change `staged`, which has the tensors of the earlier version, in place. Raises WeightsError; then its tensors
    are of no version."""
    positions: dict[str, torch.Tensor] = {}
    for name, tensor in tensors(dict(sorted(found.items())), stopped, torch.empty):
        of = name.removesuffix(POSITIONS).removesuffix(VALUES)
        if of == name:
            staged.add(needed, name, tensor, None, in_model)
        elif of not in staged.tensors:
            raise WeightsError(f"base: it has no {of}")
        elif name.endswith(POSITIONS):  # which are before the values, by name
            positions[of] = tensor
        else:
            needed.check_values(of, tensor)
            try:
                patch(staged.tensors[of], positions.pop(of), tensor)
            except (KeyError, ValueError) as error:
                raise WeightsError(f"{of}: its positions and values do not fit: {error}") from error
    for name, wanted in checksums.items():
        if name in staged.tensors and (made := digest(name, staged.tensors[name])) != wanted:
            raise WeightsError(f"checksums: {name} was made with the digest {made}, not {wanted}")
