"""Which rank runs which sequences of which pass, in how many micro-batches, and which sequences all ranks divide.

Over ranks, how a pass is cut follows from its data and the number of ranks alone: neither other passes nor the model's
id change how its gradient is summed. A rank alone saves more: passes of one model that begin alike may run as one, and
sequences without a gradient run apart. Knows lengths, token ids and common prefixes. Knows nothing of how parts of a
sequence are computed.
"""

from __future__ import annotations

import heapq
import zlib
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest

from skyrl.trainer.collectives import sendable
from skyrl.trainer.custom_loss.loss import loss_of
from skyrl.trainer.device import HOST, failure_of
from skyrl.trainer.losses import Loss
from skyrl.trainer.passes.pass_run import JoinedPasses, PassRun, SinglePassRun, items_of, join_passes
from skyrl.trainer.protocol import Datum, TrainingPass
from skyrl.trainer.rows.packing import cut
from skyrl.trainer.rows.prefixes import Node, PrefixTree, prefix_tree

FEWEST_ROWS = 16
"""Of a rank's part of a sequence. A convolution reads fewer rows before each row."""


@dataclass(frozen=True)
class Division:
    """`tree`: of all sequences of a pass. `divided`: those that run over all ranks, each alone, ascending. `left`: the
    others, ascending, with the tree `of_left`, in which they have the indices 0, 1, ..."""

    tree: PrefixTree
    divided: tuple[int, ...]
    left: tuple[int, ...]
    of_left: PrefixTree


def divide(data: Sequence[Datum], ranks: int, tokens: int | None) -> Division:
    """Sequences of at least so many tokens are divided (None: no sequence is), if the ranks are several. They share no
    rows with others. Sequences with pictures are not divided."""
    least = None if tokens is None or ranks == 1 else max(tokens, FEWEST_ROWS * ranks)
    divided = tuple(
        index
        for index, datum in enumerate(data)
        if least is not None and len(datum.tokens) >= least and not datum.pictures
    )
    left = tuple(index for index in range(len(data)) if index not in divided)
    if not divided:
        tree = prefix_tree(data)
        return Division(tree, divided, left, tree)
    of_left = prefix_tree([data[index] for index in left]) if left else PrefixTree((), ())
    nodes = [replace(node, source=left[node.source]) for node in of_left.nodes]
    ends = dict(zip(left, of_left.ends, strict=True))
    for index in divided:
        ends[index] = len(nodes)
        nodes.append(Node(-1, 0, len(data[index].tokens), index))
    return Division(PrefixTree(tuple(nodes), tuple(ends[index] for index in range(len(data)))), divided, left, of_left)


@dataclass(frozen=True)
class RankShare:
    """Sequences that run together on one rank. `number`: of what they belong to (`Plan.runs`). `data`: their indices
    there, ascending. `rows`: how many rows they have, each common prefix once. `divided`: it is one sequence, of which
    every rank runs a part, in micro-batches of the same place. `trained`: the loss may have a gradient at one."""

    number: int
    data: tuple[int, ...]
    rows: int
    divided: bool = False
    trained: bool = True


@dataclass(frozen=True)
class Plan:
    """`batches[rank]` are that rank's micro-batches, in order. A rank that has fewer than `count` runs empty ones
    after them: the ranks gather parameters together, so all must run the same number. `trees`: of what runs, a pass or
    joined passes, by the number of the (first) pass. `failed`: passes that could not be cut, which have no pieces.
    `joined`: the numbers of passes that run as one. `merged`: a gradient without a finite norm fails its pass.
    `models`: of the passes, by number, where passes of several models need no order."""

    batches: tuple[tuple[tuple[RankShare, ...], ...], ...]
    trees: Mapping[int, PrefixTree]
    failed: Mapping[int, Exception]
    joined: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    merged: bool = False
    models: Mapping[int, str] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return max((len(of_rank) for of_rank in self.batches), default=0)

    def rounds(self) -> list[tuple[tuple[RankShare, ...], ...]]:
        """What the ranks run at the same time: `count` times the micro-batch of each rank."""
        return list(zip_longest(*self.batches, fillvalue=()))

    def pieces_of(self, number: int) -> list[tuple[int, RankShare]]:
        """The pieces of a pass with their ranks: rank by rank, in the order in which each rank adds their gradients.
        One that is divided is a piece of every rank."""
        return [
            (rank, piece)
            for rank, of_rank in enumerate(self.batches)
            for batch in of_rank
            for piece in batch
            if piece.number == number
        ]

    def completed(self) -> list[list[int]]:
        """For each micro-batch, the passes of which no rank has a piece left after it, ascending. A pass is never
        listed before an earlier one of its model, or with no `models` before any earlier one. Only a pass without a
        trained piece waits for no other: its gradient is zero."""
        last: dict[int, int] = {}
        trained: set[int] = set()
        for of_rank in self.batches:
            for index, batch in enumerate(of_rank):
                for piece in batch:
                    last[piece.number] = max(last.get(piece.number, 0), index)
                    if piece.trained:
                        trained.add(piece.number)
        done: list[list[int]] = [[] for _ in range(self.count)]
        latest: dict[str | None, int] = {}
        for number in sorted(last):
            place = last[number]
            if number in trained:
                model = self.models.get(number)
                place = latest[model] = max(latest.get(model, 0), place)
            done[place].append(number)
        return done

    def holders(self, number: int) -> list[int]:
        """The ranks that have pieces of a pass, ascending."""
        return sorted({rank for rank, _ in self.pieces_of(number)})


def make_plan(
    passes: Sequence[tuple[int, TrainingPass]],
    ranks: int,
    budget: int,
    *,
    shared_rows: int,
    divided_tokens: int | None = None,
) -> Plan:
    """A plan for passes, given with their numbers. A micro-batch of a rank has at most `budget` rows or one sequence.
    A pass that raises while it is cut, for example because memory is short, fails alone.

    With `shared_rows` 0 each piece is a micro-batch. Otherwise pieces of several passes share micro-batches of at most
    so many rows; then a pass's ranks depend on the other passes, too.

    Sequences of at least `divided_tokens` run before all others, each in a micro-batch of its own on all ranks.
    """
    merge = shared_rows > 0
    batches: list[list[list[RankShare]]] = [[] for _ in range(ranks)]
    open_rows, all_rows = [0] * ranks, [0] * ranks
    """Of each rank: the rows of its last micro-batch, and of all its pieces."""
    trees: dict[int, PrefixTree] = {}
    failed: dict[int, Exception] = {}
    divided: list[tuple[RankShare, ...]] = []
    for number, training_pass in passes:
        try:
            division = divide(training_pass.data, ranks, divided_tokens)
            left, tree = division.left, division.of_left
            rounds = [
                [RankShare(number, tuple(left[index] for index in part), tree.rows(part)) for part in parts]
                for parts in (cut_evenly(tree, ranks, budget) if left else ())
            ]
            first = _first_rank(training_pass, ranks)
        except Exception as error:  # it is this pass's outcome; others go on
            failed[number] = sendable(failure_of(error, HOST))
            continue
        trees[number] = division.tree
        divided += [
            (RankShare(number, (index,), division.tree.rows([index]), divided=True),) for index in division.divided
        ]
        for pieces in rounds:
            by_load = sorted(range(ranks), key=lambda rank: all_rows[rank])
            for place, piece in enumerate(pieces):
                if not piece.data:
                    continue
                rank = by_load[place] if merge else (first + place) % ranks
                if merge and batches[rank] and open_rows[rank] + piece.rows <= shared_rows:
                    batches[rank][-1].append(piece)
                    open_rows[rank] += piece.rows
                else:
                    batches[rank].append([piece])
                    open_rows[rank] = piece.rows
                all_rows[rank] += piece.rows
    return Plan(tuple((*divided, *(tuple(batch) for batch in of_rank)) for of_rank in batches), trees, failed)


def plan_alone(
    passes: Sequence[tuple[int, TrainingPass]],
    budget: int,
    losses: Mapping[str, Loss],
    device_type: str,
    *,
    merge: bool,
    shared_rows: int,
) -> Plan:
    """A plan for a rank without others. A micro-batch has at most `shared_rows` rows or one piece, and a piece at most
    `budget` rows or one sequence; pieces without a gradient come first. With `merge` passes of one model run as one if
    they share prefixes. `device_type`: of the rank."""
    singles = [SinglePassRun(None, each, loss_of(each, losses)) for _, each in passes]
    number_of = {id(running): number for running, (number, _) in zip(singles, passes, strict=True)}
    trees: dict[int, PrefixTree] = {}
    failed: dict[int, Exception] = {}
    joined: dict[int, tuple[int, ...]] = {}
    pieces: list[RankShare] = []
    waiting: list[PassRun] = list(reversed(join_passes(singles) if merge else singles))
    while waiting:
        running = waiting.pop()
        items = items_of(running, budget, device_type)
        members = running.members if isinstance(running, JoinedPasses) else [running]
        number, *others = (number_of[id(member)] for member in members)
        if running.error is None:
            trees[number] = running.tree
            pieces += [RankShare(number, tuple(each.indices), each.rows, trained=each.trained) for each in items]
            if others:
                joined[number] = (number, *others)
        elif others:  # passes that run apart are right, too
            waiting += reversed(members)
        else:
            failed[number] = sendable(running.error)
    batches: list[tuple[RankShare, ...]] = []
    for trained in (False, True):
        of_kind = [piece for piece in pieces if piece.trained is trained]
        parts = cut([piece.rows for piece in of_kind], shared_rows)
        batches += [tuple(of_kind[part.start : part.stop]) for part in parts]
    models = {number: each.model_id for number, each in passes}
    return Plan((tuple(batches),), trees, failed, joined, merge, models)


def cut_evenly(tree: PrefixTree, ranks: int, budget: int) -> list[list[list[int]]]:
    """Rounds of one part for each rank; a part is a list of ascending indices, perhaps empty.

    The parts of all rounds have about the same number of rows, and each `fits` the budget. Sequences that
    share rows stay together, unless they have more rows than a part should have.
    """
    sequences = len(tree.ends)
    most = -(-sequences // ranks)

    def fits(count: int) -> bool:
        parts = _spread(tree, count, ranks, budget)
        return count >= most or all(tree.fits(part, budget) for part in parts)

    count = max(1, -(-tree.rows(range(sequences)) // (budget * ranks)))
    if not fits(count):
        count = bisect_left(range(most), True, lo=count + 1, key=fits)
    parts = _spread(tree, count, ranks, budget)
    parts.sort(key=lambda part: -tree.rows(part))
    return [[sorted(part) for part in parts[start : start + ranks]] for start in range(0, count * ranks, ranks)]


def _spread(tree: PrefixTree, rounds: int, ranks: int, budget: int) -> list[list[int]]:
    """Largest families first, each into the part with the fewest rows. A family that is larger than a part should be is
    cut first. With several rounds its pieces have at least twice the rows of its longest sequence, because smaller
    pieces share few rows; with one round it is more important that no rank waits."""
    count = rounds * ranks
    even = -(-tree.rows(range(len(tree.ends))) // count)
    pieces: list[list[int]] = []
    for family in tree.families:
        least = 0 if rounds == 1 else 2 * max(tree.rows([index]) for index in family)
        pieces += tree.cut_family(family, min(budget, max(even, least)))
    pieces.sort(key=lambda piece: -tree.rows(piece))
    parts: list[list[int]] = [[] for _ in range(count)]
    fewest = [(0, number) for number in range(count)]
    for piece in pieces:
        rows, number = heapq.heappop(fewest)
        parts[number] += piece
        heapq.heappush(fewest, (rows + tree.rows(piece), number))
    return parts


def _first_rank(training_pass: TrainingPass, ranks: int) -> int:
    """The rank of a pass's largest part. It differs between passes, so that small passes spread over the ranks. The
    model's id does not count: a training script that runs again has the same sums, in its new model."""
    digest = 0
    for datum in training_pass.data:
        digest = zlib.crc32(datum.tokens.tobytes(), digest)
    return digest % ranks
