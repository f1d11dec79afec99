"""CUDA graphs on torch's meta device, for counting: the trainer's own graphs, which replay what a capture has cost.

A replay costs the GPU what the captured function costs, copies to its places with it, and the host one operation.
Micro-batches are padded to multiples of 64 rows, as classes pad that have learned a training whose batches differ
little. Knows tensors without numbers. Knows nothing of what is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks import on_meta
from skyrl.trainer.graphs.pieces import Graphs
from skyrl.trainer.graphs.recorder import Compute
from skyrl.trainer.graphs.row_classes import MULTIPLE, RowClasses
from skyrl.trainer.model.layer_graphs import MOST_ROWS


class MetaRecorder:
    """A `Recorder`. measured: what calling a function costs; `replayed`: is told so at each replay."""

    held_bytes = 0

    def __init__(self, measured: Callable[[Callable[[], None]], Any], replayed: Callable[[Any], None]) -> None:
        self._measured, self._replayed = measured, replayed

    def capture(self, compute: Compute, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> Callable[[], None]:
        costs = self._measured(lambda: compute(reads, writes))
        return lambda: self._replayed(costs)

    def wait(self) -> None:
        pass

    def forget(self) -> None:
        pass


@contextmanager
def graphs_on_meta(recorder: MetaRecorder) -> Iterator[None]:
    """Inside, new backends on the meta device run their plain layers as graphs, captured from the first micro-batch
    on."""
    classes = RowClasses(tuple(range(MULTIPLE, MOST_ROWS + 1, MULTIPLE)))

    def made() -> Graphs:
        return Graphs(recorder, classes, on_meta.META, most_bytes=float("inf"), warm_up=0)

    with (
        patch.object(on_meta, "make_graphs", made),
        patch.object(torch.UntypedStorage, "data_ptr", lambda storage: storage._cdata),
        patch.object(Tensor, "data_ptr", _address),
    ):
        yield


def _address(tensor: Tensor) -> int:
    """Of its own, as the meta device does not give."""
    return tensor.untyped_storage()._cdata + tensor.storage_offset() * tensor.itemsize
