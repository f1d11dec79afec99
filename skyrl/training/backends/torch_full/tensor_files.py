"""Safetensors files that are written and read in pieces, so that no tensor must be in memory as a whole.

Knows the format: a length, a JSON header, and the tensors' bytes. Knows nothing of models.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import safe_open

from skyrl.training.backends.torch_lora.stored_weights import INDEX, PLAIN

_NAMES = {dtype: name for name, dtype in PLAIN.items()} | {torch.int32: "I32"}
_ALIGNMENT = 8
Shapes = Mapping[str, tuple[int, ...]]
AT_ONCE = 2**22
"""Elements that are computed or copied at a time, or one row: 16 MiB in float32."""


def row_parts(shape: Sequence[int]) -> Iterator[slice]:
    """A tensor's rows in parts of at most AT_ONCE elements, or one row."""
    step = max(1, AT_ONCE // max(1, math.prod(shape[1:])))
    for start in range(0, shape[0], step):
        yield slice(start, min(start + step, shape[0]))


class TensorFiles:
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
        self._opened = ExitStack()
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

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._opened.close()

    def write(self, key: str, begin: int, values: npt.NDArray[Any]) -> None:
        """Write elements of a tensor, from its element `begin` on. `values`: the elements' bytes, contiguous, of any
        dtype. Raises OSError."""
        descriptor, start, itemsize = self._places[key]
        rest = values.reshape(-1).view(np.uint8).data
        offset = start + begin * itemsize
        while len(rest):
            written = os.pwrite(descriptor, rest, offset)
            rest, offset = rest[written:], offset + written


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


class StoredTensors:
    """Reads float32 tensors of safetensors files in pieces. Close it after the last piece."""

    def __init__(self, files: Iterable[Path], expected: Shapes, others: Collection[str] = ()) -> None:
        """Raises ValueError unless the files have exactly the `expected` tensors, and perhaps some of the `others`;
        OSError or SafetensorError when files are missing or damaged."""
        self._places: dict[str, tuple[int, int]] = {}
        found: dict[str, tuple[int, ...]] = {}
        self._opened = ExitStack()
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

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._opened.close()

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
