"""The safetensors files of a model: the tensors of the base model's files, with what was trained in their place.

So all that loads the base model loads them: names, and the division of experts into tensors, are the release's. What
the trainer has no use for is copied from the base model: a vision tower, layers that predict further tokens, the
corrections of routers' scores.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from huggingface_hub import snapshot_download, try_to_load_from_cache
from torch import Tensor
from transformers import GenerationConfig

from skyrl.training.backends.torch_full.tensor_files import StoredTensors, sharded_files
from skyrl.training.backends.torch_lora.conversions import FileTensor
from skyrl.training.backends.torch_lora.model_config import read_config
from skyrl.training.backends.torch_lora.stored_weights import PLAIN, StoredWeights, weight_files

_BESIDE_WEIGHTS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "generation_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
)
Write = Callable[[str, int, npt.NDArray[np.uint8]], None]
"""Writes a parameter's elements, from one of its elements on: their bytes in the files' dtype."""
Read = Callable[[str, int, npt.NDArray[np.float32]], None]
"""Fills an array with a parameter's elements, from one of its elements on."""


@dataclass(frozen=True)
class _Part:
    """Elements of the tensor `name`, from `begin` on: those of a piece of a parameter, from `place` to `end`."""

    name: str
    begin: int
    place: int
    end: int


class ModelFiles:
    """Writes and reads models of the architecture of the base model at the path `base`, with its config.json and its
    tokenizer."""

    def __init__(self, base: str, architecture: str, in_files: Mapping[str, Sequence[FileTensor]]) -> None:
        """`architecture`: the model's class in transformers. `in_files`: see `file_tensors`. Finds the base model's
        files, and which other tensors they hold."""
        self._base = base
        self._architecture = architecture
        self._in_files = in_files
        self._once = {name: _once(tensors) for name, tensors in in_files.items()}
        self._paths = weight_files(base)
        self._described = read_config(base)
        self._trained = _shapes(in_files)
        with self._base_weights(torch.float32) as stored:
            self._others = [name for name in stored.keys() if name not in self._trained]  # noqa: SIM118

    @contextmanager
    def written(self, directory: Path, dtype: torch.dtype, shard_bytes: int) -> Iterator[Write]:
        """Files in which parameters have this dtype, of at most `shard_bytes` or one tensor. All elements of all
        parameters must be written; all else is written here."""
        with self._base_weights(dtype) as stored:
            slices = {name: stored.get_slice(name) for name in self._others}
            shapes = self._trained | {name: tuple(each.get_shape()) for name, each in slices.items()}
            dtypes = dict.fromkeys(self._trained, dtype)
            dtypes |= {name: PLAIN[each.get_dtype()] for name, each in slices.items()}
            described = {name: torch.empty(shape, dtype=dtypes[name], device="meta") for name, shape in shapes.items()}
            totals = {"total_parameters": sum(tensor.numel() for tensor in described.values())}
            with sharded_files(directory, described, shard_bytes, totals) as tensors:
                for name, each in slices.items():
                    tensors.write(name, 0, bytes_of(each[...]))

                def write(name: str, begin: int, values: npt.NDArray[np.uint8]) -> None:
                    size = dtype.itemsize
                    for part in _parts(self._in_files[name], begin, len(values) // size):
                        tensors.write(part.name, part.begin, values[part.place * size : part.end * size])

                yield write
        self._describe(directory, dtype)

    def _describe(self, directory: Path, dtype: torch.dtype) -> None:
        config: Any = self._described.config
        config.architectures = [self._architecture]
        config.save_pretrained(directory)
        written = directory / "config.json"
        described = json.loads(written.read_text())
        for part in (described, described.get("text_config", {})):
            part["dtype"] = str(dtype).removeprefix("torch.")
        written.write_text(json.dumps(described, indent=2) + "\n")
        # The base model's own file takes its place, if there is one: saving that again fails for values of which
        # transformers warns
        GenerationConfig().save_pretrained(directory)
        for file in files_beside_weights(self._base):
            shutil.copyfile(file, directory / file.name)

    @contextmanager
    def opened(self, directory: Path) -> Iterator[Read]:
        """Files in which parameters are float32. What is not trained may be missing, and so may second names of tied
        parameters. Raises OSError, ValueError or SafetensorError when files are missing or damaged, or hold another
        model."""
        files = sorted(directory.glob("model*.safetensors"))
        needed = _shapes(self._once)
        with StoredTensors(files, needed, {*self._others, *self._trained} - needed.keys()) as tensors:

            def read(name: str, begin: int, into: npt.NDArray[np.float32]) -> None:
                for part in _parts(self._once[name], begin, len(into)):
                    tensors.read(part.name, part.begin, into[part.place : part.end])

            yield read

    def _base_weights(self, dtype: torch.dtype) -> StoredWeights:
        return StoredWeights(self._base, self._paths, self._described.format, dtype)


def _shapes(in_files: Mapping[str, Sequence[FileTensor]]) -> dict[str, tuple[int, ...]]:
    return {each.name: each.shape for tensors in in_files.values() for each in tensors}


def _once(tensors: Sequence[FileTensor]) -> list[FileTensor]:
    """Without those that hold a tied parameter again."""
    found: list[FileTensor] = []
    for tensor in tensors:
        if found and tensor.place == 0:
            break
        found.append(tensor)
    return found


def _parts(tensors: Sequence[FileTensor], begin: int, count: int) -> Iterator[_Part]:
    """Where `count` elements of a parameter are in the files."""
    for tensor in tensors:
        low, high = max(begin, tensor.place), min(begin + count, tensor.place + tensor.count)
        if low < high:
            yield _Part(tensor.name, low - tensor.place, low - begin, high - begin)


def bytes_of(values: Tensor) -> npt.NDArray[np.uint8]:
    """The bytes of a tensor's elements, flat."""
    return values.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


@cache
def files_beside_weights(base: str) -> tuple[Path, ...]:
    """The files of a model's tokenizer and processor, as many as it has. Those of a model of the hub are fetched once,
    because the process that saves need not have loaded them; without the hub, those that are in its cache."""
    if Path(base).is_dir():
        return tuple(file for name in _BESIDE_WEIGHTS if (file := Path(base) / name).is_file())
    with suppress(OSError):
        snapshot_download(base, allow_patterns=[*_BESIDE_WEIGHTS])
    found = [try_to_load_from_cache(base, name) for name in _BESIDE_WEIGHTS]
    return tuple(Path(file) for file in found if isinstance(file, str))
