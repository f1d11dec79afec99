"""The safetensors files of a base model: finds them, checks that they are complete, and reads their tensors as if none
were quantized.

Files are read, and not mapped: what has been read takes no memory, and a file that changes later changes no weight.
Knows nothing of a model's layers, of adapters or of ranks.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import safe_open
from transformers.utils.hub import cached_file

from skyrl.training.backends.torch_lora.model_config import LOADING_ERRORS, cannot_load, one_line
from skyrl.training.backends.torch_lora.quantization import Format
from skyrl.training.backends.torch_lora.quantized_slices import QuantizedSlice

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


class StoredWeights:
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
        self._opened = ExitStack()
        try:
            for file in files:
                reader = self._open(file)
                self._readers |= dict.fromkeys(reader.keys(), reader)
            self._group(form, dtype)
        except BaseException:
            self._opened.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._opened.close()

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
