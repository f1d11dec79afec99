"""The files of `state.py` of a model that is divided over ranks: written from what the ranks send, and sent to them.

The ranks see none of these files. Tensors come and go in pages, so that neither the engine nor a rank holds a copy of
the model for a save.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from skyrl.training.backends.torch_full.model_files import ModelFiles, Read
from skyrl.training.backends.torch_full.rank import FullFacts, StateFacts
from skyrl.training.backends.torch_full.state import (
    SHARD_BYTES,
    describe_state,
    optimizer_files,
    read_description,
)
from skyrl.training.backends.torch_full.tensor_files import StoredTensors, TensorFiles
from skyrl.training.backends.torch_lora.group import RankGroup, results_of
from skyrl.training.backends.torch_lora.shards import ShardLayout

PAGE = 2**24
"""Elements that all ranks together send, or get, at a time: 64 MiB in float32."""


class ShardedState:
    """The tensors of the models that the ranks of a group train, and their files."""

    def __init__(self, group: RankGroup, base: str, facts: FullFacts) -> None:
        """`base`: the path of the base model."""
        self._group = group
        self._facts = facts
        self._layout = ShardLayout(facts.shapes, group.size)
        self._files = ModelFiles(base, facts.architecture, facts.in_files)
        self._page = max(1, PAGE // group.size)

    def save_model(self, model_id: str, directory: Path, dtype: torch.dtype, shard_bytes: int = SHARD_BYTES) -> None:
        """As `state.save_model`."""
        with self._files.written(directory, dtype, shard_bytes) as write:
            for name, begin, values in self._pieces(model_id, "weights", dtype):
                write(name, begin, values)

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
            self._files.opened(directory) as read_weights,
            StoredTensors(description.files if optimizer else (), moments) as others,
        ):
            self._call("begin_load", model_id, parts)
            try:
                self._send("weights", read_weights)
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

    def _send(self, part: str, read: Read) -> None:
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
