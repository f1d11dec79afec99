"""Reads a GGUF file: its metadata as Python values, and its tensors some rows at a time, dequantized.

Knows the library `gguf`. Knows nothing of architectures.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from skyrl.base.config.server import ConfigError

READING_ERRORS = (ValueError, KeyError, IndexError, TypeError, OverflowError, MemoryError, UnicodeDecodeError)
"""What the library raises for damaged files, besides OSError."""


class GgufFile:
    """An opened file. `metadata` has all keys; `tensors` the shapes in torch's order, [rows, columns]."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError: the file is no GGUF, is cut off or damaged, is a part of several, or has a tensor whose
        type cannot be dequantized. Raises OSError."""
        try:
            from gguf import GGUFReader
        except ImportError as error:
            raise ConfigError("the package gguf is missing: run make setup again, or pip install gguf") from error
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise ConfigError(f"{path} is no GGUF file: it does not begin with GGUF")
        try:
            reader = GGUFReader(path)
            self.metadata: dict[str, Any] = {name: field.contents() for name, field in reader.fields.items()}
        except READING_ERRORS as error:
            raise ConfigError(f"{path} is damaged or cut off: {_one_line(error)}") from error
        self.path = path
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.tensors = {
            name: tuple(int(size) for size in reversed(tensor.shape)) for name, tensor in self._tensors.items()
        }
        if (parts := self.metadata.get("split.count", 1)) > 1:
            raise ConfigError(f"{path} is one of {parts} parts: join them with llama-gguf-split --merge")
        if not self._tensors:
            raise ConfigError(f"{path} holds no weights, only a vocabulary")
        self._check_types()

    def required(self, key: str) -> Any:
        """The value of a key. Raises ConfigError when the file lacks it."""
        try:
            return self.metadata[key]
        except KeyError:
            raise ConfigError(f"{self.path} lacks {key}") from None

    def type_of(self, tensor: str) -> str:
        """The name of a tensor's type: F32, Q4_K, ..."""
        return self._tensors[tensor].tensor_type.name

    def rows(self, tensor: str, chosen: slice | npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """These rows of a tensor, dequantized: float32 [n, columns], or [n] of a vector. Raises ConfigError for
        numbers that are not finite."""
        from gguf.quants import dequantize

        stored = self._tensors[tensor]
        values = np.asarray(dequantize(stored.data[chosen], stored.tensor_type), np.float32)
        if not np.isfinite(values).all():
            raise ConfigError(f"{self.path}: {tensor} has numbers that are not finite")
        return values

    def same(self, one: str, other: str) -> bool:
        """Whether two tensors hold the same bytes."""
        first, second = self._tensors[one], self._tensors[other]
        return first.tensor_type == second.tensor_type and np.array_equal(first.data, second.data)

    def _check_types(self) -> None:
        seen: set[str] = set()
        for name, tensor in self._tensors.items():
            if (kind := tensor.tensor_type.name) in seen:
                continue
            seen.add(kind)
            try:
                self.rows(name, slice(0, 1))
            except NotImplementedError as error:
                raise ConfigError(f"{self.path}: {name} has the type {kind}, which cannot be dequantized") from error


def only_known(file: GgufFile, prefix: str, known: Collection[str]) -> None:
    """Raise ConfigError for a key under `prefix` that is not known: it may change what the model computes."""
    unknown = sorted(
        key for key in file.metadata if key.startswith(f"{prefix}.") and key[len(prefix) + 1 :] not in known
    )
    if unknown:
        raise ConfigError(f"{file.path} has {', '.join(unknown[:4])}, which the conversion does not know")


def _one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
