"""Which rank runs which sequences of which pass, and in how many micro-batches.

How a pass is cut follows from that pass and the number of ranks alone, so that other passes do not change how its
gradient is summed. Knows lengths and token ids. Knows nothing of adapters or losses.
"""

from __future__ import annotations

import heapq
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from skyrl.backends.base import TrainingPass
from skyrl.backends.torch_lora.packing import cut


@dataclass(frozen=True)
class Piece:
    """Sequences of one pass that run together on one rank. `number`: the pass's index. `data`: the indices of its
    sequences, ascending."""

    number: int
    data: tuple[int, ...]
    tokens: int


@dataclass(frozen=True)
class Plan:
    """`batches[rank]` are that rank's micro-batches, in order. A rank that has fewer than `count` runs empty ones
    after them: the ranks gather parameters together, so all must run the same number."""

    batches: tuple[tuple[tuple[Piece, ...], ...], ...]

    @property
    def count(self) -> int:
        return max((len(of_rank) for of_rank in self.batches), default=0)

    def of(self, rank: int) -> list[tuple[Piece, ...]]:
        """`count` micro-batches of a rank."""
        own = self.batches[rank]
        return [*own, *[()] * (self.count - len(own))]

    def pieces_of(self, number: int) -> list[tuple[int, Piece]]:
        """The pieces of a pass with their ranks: rank by rank, in the order in which each rank adds their gradients."""
        return [
            (rank, piece)
            for rank, of_rank in enumerate(self.batches)
            for batch in of_rank
            for piece in batch
            if piece.number == number
        ]

    def completed(self) -> list[list[int]]:
        """For each micro-batch, the passes of which no rank has a piece left after it, ascending. A pass is never
        listed before an earlier one."""
        last: dict[int, int] = {}
        for of_rank in self.batches:
            for index, batch in enumerate(of_rank):
                for piece in batch:
                    last[piece.number] = max(last.get(piece.number, 0), index)
        done: list[list[int]] = [[] for _ in range(self.count)]
        latest = 0
        for number in sorted(last):
            latest = max(latest, last[number])
            done[latest].append(number)
        return done

    def holders(self, number: int) -> list[int]:
        """The ranks that have pieces of a pass, ascending."""
        return sorted({rank for rank, _ in self.pieces_of(number)})


def make_plan(passes: Sequence[tuple[int, TrainingPass]], ranks: int, budget: int, *, merge: bool) -> Plan:
    """A plan for passes, given with their numbers. A micro-batch of a rank has at most `budget` tokens or one sequence.

    Without `merge` each piece is a micro-batch. With `merge`, pieces of several passes share micro-batches; then a
    pass's ranks depend on the other passes, too.
    """
    batches: list[list[list[Piece]]] = [[] for _ in range(ranks)]
    open_tokens, all_tokens = [0] * ranks, [0] * ranks
    """Of each rank: the tokens of its last micro-batch, and of all its pieces."""
    for number, training_pass in passes:
        lengths = [len(datum.tokens) for datum in training_pass.data]
        first = _first_rank(training_pass, ranks)
        for parts in cut_evenly(lengths, ranks, budget):
            by_load = sorted(range(ranks), key=lambda rank: all_tokens[rank])
            for place, data in enumerate(parts):
                if not data:
                    continue
                rank = by_load[place] if merge else (first + place) % ranks
                piece = Piece(number, tuple(data), sum(lengths[index] for index in data))
                if merge and batches[rank] and open_tokens[rank] + piece.tokens <= budget:
                    batches[rank][-1].append(piece)
                    open_tokens[rank] += piece.tokens
                else:
                    batches[rank].append([piece])
                    open_tokens[rank] = piece.tokens
                all_tokens[rank] += piece.tokens
    return Plan(tuple(tuple(tuple(batch) for batch in of_rank) for of_rank in batches))


def cut_evenly(lengths: Sequence[int], ranks: int, budget: int) -> list[list[list[int]]]:
    """Rounds of one part for each rank; a part is a list of ascending indices, perhaps empty.

    The parts of all rounds have about the same number of tokens, and at most `budget` or one item. With one rank the
    parts are consecutive, as in training without ranks.
    """
    if ranks == 1:
        return [[list(part)] for part in cut(lengths, budget)]
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    count = max(1, -(-sum(lengths) // (budget * ranks)))
    while True:
        parts = _spread(lengths, order, count * ranks)
        if count * ranks >= len(lengths) or all(
            len(part) <= 1 or sum(lengths[index] for index in part) <= budget for part in parts
        ):
            break
        count += 1
    parts.sort(key=lambda part: -sum(lengths[index] for index in part))
    return [[sorted(part) for part in parts[start : start + ranks]] for start in range(0, count * ranks, ranks)]


def _spread(lengths: Sequence[int], order: Sequence[int], count: int) -> list[list[int]]:
    """Longest items first, each into the part with the fewest tokens."""
    parts: list[list[int]] = [[] for _ in range(count)]
    fewest = [(0, number) for number in range(count)]
    for index in order:
        tokens, number = heapq.heappop(fewest)
        parts[number].append(index)
        heapq.heappush(fewest, (tokens + lengths[index], number))
    return parts


def _first_rank(training_pass: TrainingPass, ranks: int) -> int:
    """The rank of a pass's largest part. It follows from the pass, and differs between passes, so that small passes
    spread over the ranks."""
    digest = zlib.crc32(training_pass.model_id.encode())
    for datum in training_pass.data:
        digest = zlib.crc32(datum.tokens.tobytes(), digest)
    return digest % ranks
