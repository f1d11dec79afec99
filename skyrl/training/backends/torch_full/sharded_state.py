"""The files of `state.py` of a model that is divided over ranks: written from what the ranks send, and sent to them.

The ranks see none of these files. Tensors come and go in pages, so that neither the engine nor a rank holds a copy of
the model for a save.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from huggingface_hub import split_torch_state_dict_into_shards
from transformers import GenerationConfig

from skyrl.training.backends.torch_full.rank import FullFacts, StateFacts
from skyrl.training.backends.torch_full.state import (
    SHARD_BYTES,
    complete_model,
    describe_state,
    optimizer_files,
    read_description,
)
from skyrl.training.backends.torch_full.tensor_files import Shapes, StoredTensors, TensorFiles
from skyrl.training.backends.torch_lora.group import RankGroup, results_of
from skyrl.training.backends.torch_lora.model_config import read_config
from skyrl.training.backends.torch_lora.shards import ShardLayout, Span

PAGE = 2**24
"""Elements that all ranks together send, or get, at a time: 64 MiB in float32."""
INDEX = "model.safetensors.index.json"


class ShardedState:
    """The tensors of the models that the ranks of a group train, and their files."""

    def __init__(self, group: RankGroup, base: str, facts: FullFacts) -> None:
        """`base`: the path of the base model."""
        self._group = group
        self._base = base
        self._facts = facts
        self._layout = ShardLayout(facts.shapes, group.size)
        self._in_files = {name: list(_one_after_the_other(tensors)) for name, tensors in facts.in_files.items()}
        """The files' tensors that make each parameter. `place`: where they are in it."""
        kept = {name: values.shape for name, values in facts.kept.items()}
        self._model_tensors = kept | {
            stored: shape for tensors in facts.in_files.values() for stored, shape in tensors.items()
        }
        """The shapes of all tensors of the model's files."""
        self._page = max(1, PAGE // group.size)

    def save_model(self, model_id: str, directory: Path, dtype: torch.dtype, shard_bytes: int = SHARD_BYTES) -> None:
        """As `state.save_model`."""
        config = read_config(self._base).config
        config.architectures = [self._facts.architecture]
        config.save_pretrained(directory)
        GenerationConfig().save_pretrained(directory)
        shapes, kept = self._model_tensors, self._facts.kept
        dtypes = {name: torch.float32 if name in kept else dtype for name in shapes}
        described = {name: torch.empty(shape, dtype=dtypes[name], device="meta") for name, shape in shapes.items()}
        split = split_torch_state_dict_into_shards(
            described, filename_pattern="model{suffix}.safetensors", max_shard_size=shard_bytes
        )
        files = {file: {name: shapes[name] for name in names} for file, names in split.filename_to_tensors.items()}
        with TensorFiles(directory, files, dtypes, {"format": "pt"}) as written:
            for name, values in kept.items():
                written.write(name, 0, values)
            for name, begin, values in self._pieces(model_id, "weights", dtype):
                for part in self._parts(name, begin, len(values) // dtype.itemsize):
                    first = part.place * dtype.itemsize
                    written.write(part.name, part.begin, values[first : first + part.count * dtype.itemsize])
        if split.is_sharded:
            total = sum(tensor.numel() for tensor in described.values())
            index = {
                "metadata": {"total_parameters": total, **split.metadata},
                "weight_map": split.tensor_to_filename,
            }
            (directory / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
        complete_model(directory, self._base, dtype)

    def save_state(self, model_id: str, directory: Path, shard_bytes: int = SHARD_BYTES) -> None:
        """As `state.save_state`."""
        self.save_model(model_id, directory, torch.float32, shard_bytes)
        facts: StateFacts = self._call("state_facts", model_id)[0]
        files = optimizer_files(self._facts.shapes, facts.parts, shard_bytes)
        with TensorFiles(directory, files) as written:
            for part in facts.parts:
                for name, begin, values in self._pieces(model_id, part, torch.float32):
                    written.write(f"{part}.{name}", begin, values)
        describe_state(directory, facts.step, facts.parts, list(files))

    def load_state(self, model_id: str, directory: Path, *, optimizer: bool) -> None:
        """As `state.load_state`. Each rank gets its own rows, and changes the model when it has them all."""
        description = read_description(directory)
        parts = description.parts if optimizer else ()
        shapes = self._facts.shapes
        moments = {f"{part}.{name}": shape for part in parts for name, shape in shapes.items()}
        with (
            StoredTensors(sorted(directory.glob("model*.safetensors")), self._model_tensors) as weights,
            StoredTensors(description.files if optimizer else (), moments) as others,
        ):
            self._call("begin_load", model_id, parts)
            try:
                self._send("weights", partial(self._read_parameter, weights))
                for part in parts:
                    self._send(part, lambda name, begin, into, part=part: others.read(f"{part}.{name}", begin, into))
            except Exception:
                self._call("abandon_load")
                raise
        self._call("end_load", model_id, description.step if optimizer else 0)

    def _pieces(self, model_id: str, part: str, dtype: torch.dtype) -> Iterator[tuple[str, int, npt.NDArray[np.uint8]]]:
        """All elements of a part, in pieces: a tensor's name, the piece's first element, and its bytes."""
        name, size = str(dtype).removeprefix("torch."), dtype.itemsize
        for start in self._pages():
            pages = self._call("read_part", model_id, part, start, start + self._page, name)
            for rank, page in enumerate(pages):
                for span in self._layout.spans(rank, start, start + self._page):
                    place = (span.place - start) * size
                    yield span.name, span.begin, page[place : place + span.count * size]

    def _parts(self, name: str, begin: int, count: int) -> Iterator[Span]:
        """The files' tensors, or parts of them, that hold elements of a parameter. `place`: counted from `begin` on."""
        for tensor in self._in_files[name]:
            low, high = max(begin, tensor.place), min(begin + count, tensor.place + tensor.count)
            if low < high:
                yield Span(tensor.name, low - tensor.place, low - begin, high - low)

    def _read_parameter(self, files: StoredTensors, name: str, begin: int, into: npt.NDArray[np.float32]) -> None:
        for part in self._parts(name, begin, len(into)):
            files.read(part.name, part.begin, into[part.place : part.place + part.count])

    def _send(self, part: str, read: Callable[[str, int, npt.NDArray[np.float32]], None]) -> None:
        """Send all ranks their elements of a part."""
        for start in self._pages():
            pages: list[Sequence[Any]] = []
            for rank in range(self._layout.ranks):
                spans = list(self._layout.spans(rank, start, start + self._page))
                page = np.empty(sum(span.count for span in spans), np.float32)
                for span in spans:
                    place = span.place - start
                    read(span.name, span.begin, page[place : place + span.count])
                pages.append((part, start, page))
            results_of(self._group.call_each("load_part", pages))

    def _pages(self) -> range:
        return range(0, self._layout.longest, self._page)

    def _call(self, method: str, *arguments: Any) -> list[Any]:
        return results_of(self._group.call(method, *arguments))


def _one_after_the_other(tensors: Shapes) -> Iterator[Span]:
    """All elements of each tensor, with their place in the whole."""
    place = 0
    for name, shape in tensors.items():
        yield Span(name, 0, place, math.prod(shape))
        place += math.prod(shape)
