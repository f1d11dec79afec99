"""Functions over the rows of a micro-batch, run as graphs: captured once for each class of rows, then replayed.

**Who owns what a piece returns.** It lies in `RowPlaces` and `Copies`, which the next micro-batch with graphs writes.
So it lives until then: long enough for the micro-batch's backward, because only one micro-batch at a time is between
its forward and its backward. Whoever keeps a result for longer copies it; sums of gradients do. A micro-batch that
fails midway needs no cleaning up: the next one takes its memory over. A piece of a micro-batch that is not the last one
raises, so a backward that comes too late is an error and never wrong numbers. Layers that are computed again in the
backward are run without graphs, because a graph's results take the memory that recomputation saves.

**Padding.** A class has more rows than the micro-batch. The rows between are zeros in all that comes from outside, in
gradients too, so they add zeros to every sum over rows. Results are given without them. Stacked adapters' last one owns
them.

**Failures.** If a piece cannot be captured, it and the rest of its micro-batch run their functions without graphs, on
the same padded rows, and all later micro-batches run without graphs; a warning says so once. If graphs need more memory
than there is, or than `most_bytes`, all of them go, and classes from this one on run without graphs.

Knows tensors, classes of rows and graphs. Knows nothing of layers, adapters or autograd.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from skyrl.trainer.graphs.places import Copies, Place, RowPlaces, fill, layout
from skyrl.trainer.graphs.recorder import Recorder
from skyrl.trainer.graphs.row_classes import LearnedClasses, RowClasses

logger = logging.getLogger(__name__)


class Results(NamedTuple):
    """Of a piece. `of_rows`: tensors [rows, ...]. `whole`: tensors that have no rows, such as gradients of matrices."""

    of_rows: Sequence[Tensor]
    whole: Sequence[Tensor] = ()


Compute = Callable[[Hashable, Sequence[Tensor], Sequence[Tensor]], Results]
"""Of numbers, tensors at fixed addresses, and tensors with rows. A pure function: it changes none of its tensors, and
reads nothing else that may change between calls. It may return an input."""


@dataclass(frozen=True)
class Piece:
    """A function with a name. `results_of`: whose memory its results with rows take; None: its own. Pieces of several
    layers may share it whose results nobody reads any more when the next of them runs, such as gradients of rows."""

    name: Hashable
    compute: Compute
    results_of: Hashable = None

    @property
    def place(self) -> Hashable:
        return self.name if self.results_of is None else self.results_of


@dataclass
class GraphCounts:
    """Since the start. `captured` to `dropped`: graphs. `plain`: micro-batches without graphs, for whatever reason.
    `rows` and `padded`: of those with graphs, their own rows and those added."""

    captured: int = 0
    replayed: int = 0
    dropped: int = 0
    micro_batches: int = 0
    plain: int = 0
    rows: int = 0
    padded: int = 0


@dataclass
class _Graph:
    replay: Callable[[], None]
    inputs: Sequence[Place]
    of_rows: Sequence[Place]
    whole: Sequence[Tensor]
    fixed: Sequence[Tensor]
    """Kept, so that nothing else gets their addresses."""


@dataclass
class _Signature:
    """Of adapters with the same ranks and layers: where their matrices lie, and the graphs that read them there."""

    copies: Copies
    ends: Copies
    used: int = 0
    """In which micro-batch, counted with those without graphs."""
    graphs: dict[tuple[Hashable, int], dict[Hashable, _Graph]] = field(default_factory=dict)
    """By the piece's name and the class; then by the numbers and addresses that a graph has of its own."""
    whole: dict[Hashable, Tensor] = field(default_factory=dict)

    @property
    def held_bytes(self) -> int:
        return self.copies.held_bytes + self.ends.held_bytes + sum(each.nbytes for each in self.whole.values())

    def drop_graphs(self) -> int:
        """Returns how many there were."""
        count = sum(map(len, self.graphs.values()))
        self.graphs.clear()
        self.whole.clear()
        return count


WARM_UP = 1
"""Micro-batches of a class and a signature that run without graphs before the first one is captured: row counts and
ranks that come once are not worth a capture."""
REMEMBERED = 256
"""Pairs of a class and a signature whose uses are counted. The least recently used one is forgotten."""
VARIANTS = 4
"""Graphs of one piece, class and signature, with other numbers or fixed tensors. Beyond that the piece runs without a
graph: something changes each time."""
MOST_SIGNATURES = 4
"""Sets of adapters' ranks, layers and numbers with graphs at a time. The least recently used one goes."""
RECENT = 64
"""But none that one of the last so many micro-batches has used: else sets that take turns would all be captured again
and again. The new one's micro-batches run without graphs meanwhile."""


class Graphs:
    """The graphs of one model on one device. For one thread at a time.

    `most_bytes`: of all that graphs hold. All row places have the rows of the largest class that has come: when a
    larger one comes, all graphs go, and are captured again. So memory follows the largest micro-batch, as it does
    without graphs, and not the sum of the classes."""

    def __init__(
        self,
        recorder: Recorder,
        classes: RowClasses | LearnedClasses,
        device: torch.device,
        *,
        most_bytes: float,
        most_signatures: int = MOST_SIGNATURES,
        recent: int = RECENT,
        warm_up: int = WARM_UP,
    ) -> None:
        self.recorder = recorder
        self.counts = GraphCounts()
        self._classes, self._generation = classes, 0
        self._device = device
        self._most_bytes, self._most_signatures = most_bytes, most_signatures
        self._recent, self._warm_up = recent, warm_up
        self._signatures: OrderedDict[Hashable, _Signature] = OrderedDict()
        self._uses: OrderedDict[Hashable, int] = OrderedDict()
        self.places = RowPlaces(device, 0)
        self.current: GraphedRows | None = None
        self._failed = self._is_over = False
        self._refused = float("inf")

    @property
    def held_bytes(self) -> int:
        """Bytes of the device that graphs, their places and adapters' copies hold."""
        of_signatures = sum(each.held_bytes for each in self._signatures.values())
        return self.places.held_bytes + of_signatures + self.recorder.held_bytes

    def micro_batch(
        self,
        rows: int,
        leaves: Sequence[Tensor] = (),
        ends: Tensor | None = None,
        of_rows: Sequence[Tensor] = (),
    ) -> GraphedRows | None:
        """What runs the pieces of the next micro-batch; None if it is to run without graphs.

        `leaves`: adapters' matrices, all of them. `ends`: int32 [adapters], where the rows of each end if their
        matrices are stacked. `of_rows`: tensors [rows, ...] that several pieces read."""
        self.current = None
        if self._is_over:
            self.drop()
        size = None if self._failed else self._classes.of(rows)
        if size is None or size >= self._refused:
            self.counts.plain += 1
            return None
        if isinstance(self._classes, LearnedClasses) and self._generation != self._classes.generation:
            self._generation = self._classes.generation
            self.drop()
        key = layout(leaves), layout(() if ends is None else (ends,))
        signature = self._signature(key, leaves, ends) if self._used(size, key) > self._warm_up else None
        if signature is None:
            self.counts.plain += 1
            return None
        if size > self.places.capacity:
            self._drop_graphs()
            self.places = RowPlaces(self._device, size)
        self.counts.micro_batches += 1
        self.counts.rows += rows
        self.counts.padded += size - rows
        self.current = GraphedRows(self, signature, rows, size, self.counts.micro_batches)
        self.current.begin(leaves, ends, of_rows)
        return self.current

    def drop(self) -> None:
        """Drop all graphs and their memory. Results of the last micro-batch stay valid for those who hold them; its
        pieces run no more."""
        self._drop_graphs()
        self._signatures.clear()
        self.places = RowPlaces(self._device, 0)
        self.current, self._is_over = None, False

    def fail(self, error: Exception) -> None:
        """Run without graphs from the next micro-batch on."""
        said = f"{type(error).__name__}: {error}"  # a log that kept the error itself would keep its frames' tensors
        logger.warning("the trainer runs without CUDA graphs from now on: %s", said)
        self._failed = self._is_over = True

    def refuse(self, size: int) -> None:
        """Run classes of `size` rows or more without graphs from the next micro-batch on."""
        held, most = self.held_bytes / 1e9, self._most_bytes / 1e9
        logger.info("%d rows or more run without CUDA graphs: %.2f GB of %.2f GB are held", size, held, most)
        self._refused, self._is_over = min(self._refused, size), True

    @property
    def fits(self) -> bool:
        return self.held_bytes <= self._most_bytes

    def _used(self, size: int, signature: Hashable) -> int:
        """How often a micro-batch of this class and signature has come, this one included."""
        key = size, signature
        self._uses[key] = self._uses.get(key, 0) + 1
        self._uses.move_to_end(key)
        if len(self._uses) > REMEMBERED:
            self._uses.popitem(last=False)
        return self._uses[key]

    def _signature(self, key: Hashable, leaves: Sequence[Tensor], ends: Tensor | None) -> _Signature | None:
        """None if there is no place for another one now."""
        now = self.counts.micro_batches + self.counts.plain
        if (found := self._signatures.get(key)) is None:
            if len(self._signatures) >= self._most_signatures:
                oldest = next(iter(self._signatures))
                if now - self._signatures[oldest].used <= self._recent:
                    return None
                self.recorder.wait()
                self.counts.dropped += self._signatures.pop(oldest).drop_graphs()
            found = _Signature(Copies(leaves), Copies(() if ends is None else (ends,)))
            self._signatures[key] = found
        self._signatures.move_to_end(key)
        found.used = now
        return found

    def _drop_graphs(self) -> None:
        self.recorder.wait()
        self.counts.dropped += sum(each.drop_graphs() for each in self._signatures.values())
        self.recorder.forget()


class GraphedRows:
    """One micro-batch, padded to a class. `leaves`, `ends` and `of_rows`: the tensors that it was made with, at fixed
    places; `of_rows` without padding."""

    leaves: Sequence[Tensor] = ()
    ends: Tensor | None = None
    of_rows: Sequence[Tensor] = ()

    def __init__(self, graphs: Graphs, signature: _Signature, rows: int, size: int, number: int) -> None:
        self._graphs, self._signature, self._places = graphs, signature, graphs.places
        self.rows, self.size, self._number = rows, size, number
        self._captures = True

    def begin(self, leaves: Sequence[Tensor], ends: Tensor | None, of_rows: Sequence[Tensor]) -> None:
        """Copy what pieces share to its place."""
        signature = self._signature
        signature.copies.fill([leaf.detach() for leaf in leaves])
        self.leaves = signature.copies.tensors
        if ends is not None:
            signature.ends.fill([ends])
            (self.ends,) = signature.ends.tensors
            self.ends[-1:].fill_(self.size)
        shared = [self._filled("shared", index, each) for index, each in enumerate(of_rows)]
        self.of_rows = [self._own(place) for place in shared]

    @torch.no_grad()
    def run(self, piece: Piece, numbers: Hashable, fixed: Sequence[Tensor], of_rows: Sequence[Tensor]) -> Results:
        """`piece.compute` of these, from a graph. `numbers`: all of Python's that it computes with. `fixed`: tensors
        that lie elsewhere only if they are other tensors, such as frozen weights, and those of this micro-batch.
        `of_rows`: [rows, ...].

        Raises RuntimeError if a later micro-batch has begun, which has overwritten what this one keeps."""
        graphs = self._graphs
        if graphs.current is not self:
            raise RuntimeError("the memory of this micro-batch's graphs is a later one's: its backward is too late")
        there = [self._there(each, piece) for each in of_rows]
        addresses = tuple(0 if place is None else place.memory.data_ptr() for place in there)
        layouts = tuple((each.shape[1:], each.dtype) for each in of_rows)
        own = numbers, tuple(map(_whereabouts, fixed)), addresses, layouts
        known = self._signature.graphs.setdefault((piece.name, self.size), {})
        inputs = [
            self._filled("input", index, each) if place is None else place
            for index, (place, each) in enumerate(zip(there, of_rows, strict=True))
        ]
        if own not in known:
            static = [place.memory[: self.size] for place in inputs]
            computed = piece.compute(numbers, fixed, static)
            graph = None
            if self._captures and len(known) < VARIANTS:
                graph = self._captured(piece, numbers, fixed, inputs, computed)
            if graph is None:
                return Results([self._apart(each)[: self.rows] for each in computed.of_rows], computed.whole)
            known[own] = graph
            graphs.counts.captured += 1
        graph = known[own]
        graph.replay()
        graphs.counts.replayed += 1
        for place in graph.of_rows:
            place.written = self._number
        # new tensors, because autograd writes what it knows into those that a function returns
        return Results([self._own(place) for place in graph.of_rows], [each.detach() for each in graph.whole])

    def _captured(
        self,
        piece: Piece,
        numbers: Hashable,
        fixed: Sequence[Tensor],
        inputs: Sequence[Place],
        computed: Results,
    ) -> _Graph | None:
        """A graph, or None if there is none: from then on the micro-batch captures nothing more."""
        graphs, static = self._graphs, [place.memory[: self.size] for place in inputs]
        try:
            results = [self._places.take(piece.place, index, each) for index, each in enumerate(computed.of_rows)]
            whole = [self._whole(piece, index, each) for index, each in enumerate(computed.whole)]

            def compute(reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
                found = piece.compute(numbers, reads[: len(fixed)], reads[len(fixed) :])
                for memory, value in zip(writes, (*found.of_rows, *found.whole), strict=True):
                    memory.copy_(value)

            writes = [*(place.memory[: self.size] for place in results), *whole]
            replay = graphs.recorder.capture(compute, [*fixed, *static], writes)
            if graphs.fits:
                return _Graph(replay, inputs, results, whole, fixed)
            graphs.refuse(self.size)
        except torch.OutOfMemoryError:
            graphs.refuse(self.size)
        except Exception as error:  # whatever it is: the piece has been computed without the graph
            graphs.fail(error)
        self._captures = False
        return None

    def _there(self, rows: Tensor, piece: Piece) -> Place | None:
        """The place where rows lie already, with the padding that this micro-batch has written behind them."""
        place = self._places.at(rows)
        return place if place is not None and place.written == self._number and place.of != piece.place else None

    def _filled(self, of: Hashable, index: int, rows: Tensor) -> Place:
        place = self._places.take(of, index, rows)
        fill(place, rows.detach(), self.size)
        if of == "shared":
            place.written = self._number
        return place

    def _whole(self, piece: Piece, index: int, like: Tensor) -> Tensor:
        key = piece.name, index, like.shape, like.dtype
        if key not in self._signature.whole:
            self._signature.whole[key] = torch.empty_like(like, memory_format=torch.contiguous_format)
        return self._signature.whole[key]

    def _apart(self, rows: Tensor) -> Tensor:
        """Rows that a later piece does not overwrite: an input's place is that of other pieces' inputs, too."""
        return rows.clone() if self._places.has(rows) else rows

    def _own(self, place: Place) -> Tensor:
        return place.memory[: self.rows].detach()


def _whereabouts(tensor: Tensor) -> Hashable:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
