"""Common prefixes of a pass's sequences: the tree that they form, how it is cut, and the ranges of rows it is laid out
in.

Ranges of about one length attend together, which may take copies of a shared prefix. Knows numbers of rows, token ids
and routed experts. Knows nothing of torch, adapters or losses.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt

from skyrl.base.wire.routed_experts import UNRECORDED
from skyrl.trainer.protocol import Datum
from skyrl.trainer.rows.routed_experts import FIELD, signed

SHORTEST_IN_GROUP = 0.75
"""A segment joins an attention group if it has at least this share of the rows of the group's longest segment. So
padding is at most a third of the real rows."""
_BUNDLE = 3 / 8
"""Segments after a shared prefix are bundled up to this share of the prefix's rows."""


@dataclass(frozen=True)
class RowRange:
    """Consecutive rows [first, first + rows) of a layout. `parent`: the segment before them in every sequence that has
    them, -1 for none. `start`: the position of the first row in its sequences."""

    first: int
    rows: int
    parent: int
    start: int


def similar(segments: Sequence[RowRange]) -> Iterator[list[int]]:
    """Consecutive segments with one parent and similar lengths, the longest first: the attention groups."""
    group: list[int] = []
    for number, segment in enumerate(segments):
        longest = segments[group[0]] if group else segment
        if segment.parent != longest.parent or segment.rows < SHORTEST_IN_GROUP * longest.rows:
            yield group
            group = []
        group.append(number)
    yield group


def bundled(count: int, longest: int, before: int) -> int:
    """How many of a group's `count` segments form a bundle, behind a prefix of `before` rows. Each bundle has a copy of
    the keys and values of the prefix, and its segments' rows are masked from each other: more segments need less memory
    for copies and more products for nothing."""
    bundles = -(-count // max(1, round(_BUNDLE * before / longest)))
    return -(-count // bundles)


def copied_rows(segments: Sequence[RowRange]) -> int:
    """How many rows of keys and values each layer copies: the prefix of each bundle. A sliding window copies fewer."""
    copies = 0
    for members in similar(segments):
        first = segments[members[0]]
        if first.start:
            copies += -(-len(members) // bundled(len(members), first.rows, first.start)) * first.start
    return copies


MIN_SAVED_ROWS = 16
"""A common prefix is shared if this saves at least this many rows. Each shared prefix costs every layer one more call
of attention, which is about as dear as these rows."""
MAX_COPIES = 16
"""Sequences run in parts whose layers copy at most this many rows of keys and values for each row that they compute. A
layer keeps at least 14h + 4i + 4(q + 2k) numbers for a row and 2k for a copied one (docs/operating/sizing.md), so that
copies need less memory than the rows if 24k < 14h + 4i + 4q."""


def contents(data: Sequence[Datum]) -> list[npt.NDArray[np.int64]]:
    """What must be equal before rows are shared, for each sequence int64 [N, columns]: the token's id, or for a token
    of a picture a number of that token of that picture; and a number of the token's routed experts if the data have
    any."""
    tokens = _numbered(data)
    experts = experts_of(data)
    if experts is None:
        return [ids[:, None] for ids in tokens]
    numbers: dict[bytes, int] = {}
    found = []
    for ids, rows in zip(tokens, experts, strict=True):
        digests = (blake2b(row, digest_size=16).digest() for row in rows)  # rows of hundreds of bytes are not kept
        found.append(np.stack([ids, [numbers.setdefault(digest, len(numbers)) for digest in digests]], axis=1))
    return found


def _numbered(data: Sequence[Datum]) -> list[npt.NDArray[np.int64]]:
    """The tokens of each sequence. Those of pictures have negative numbers: equal ones where the picture and the place
    in it are the same."""
    first: dict[tuple[str, int], int] = {}
    given = -1
    found = []
    for datum in data:
        tokens = datum.tokens.astype(np.int64)
        for picture in datum.pictures:
            number = first.setdefault((picture.digest, picture.tokens), given)
            given = min(given, number - picture.tokens)
            tokens[picture.start : picture.stop] = number - np.arange(picture.tokens)
        found.append(tokens)
    return found


@dataclass(frozen=True)
class Node:
    """The rows of positions [start, stop), which all sequences below this node share. `parent`: the node with the rows
    before them, -1 if start is 0. `source`: a sequence that has these rows."""

    parent: int
    start: int
    stop: int
    source: int

    @property
    def rows(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class PrefixTree:
    """`nodes`: depth first, each parent before its children. `ends`: for each sequence, the node of its last row."""

    nodes: tuple[Node, ...]
    ends: tuple[int, ...]

    def path(self, index: int) -> list[int]:
        """The nodes that hold the rows of a sequence, from its first row on."""
        node, found = self.ends[index], []
        while node >= 0:
            found.append(node)
            node = self.nodes[node].parent
        return found[::-1]

    def of_range(self, start: int, stop: int) -> PrefixTree:
        """The tree of the sequences [start, stop) alone, if they share no rows with others. Families may come in
        another order among its nodes."""
        used = sorted({node for index in range(start, stop) for node in self.path(index)})
        places = {-1: -1, **{node: place for place, node in enumerate(used)}}
        nodes = [self.nodes[node] for node in used]
        return PrefixTree(
            tuple(Node(places[node.parent], node.start, node.stop, node.source - start) for node in nodes),
            tuple(places[end] for end in self.ends[start:stop]),
        )

    def rows(self, indices: Sequence[int]) -> int:
        """The number of rows of some sequences together."""
        return sum(self.nodes[node].rows for node in {node for index in indices for node in self.path(index)})

    @cached_property
    def families(self) -> list[list[int]]:
        """The sequences that share rows, directly or by others. Each family in the order of its tree, the families by
        their first sequence."""
        of_root: dict[int, list[int]] = {}
        for index in sorted(range(len(self.ends)), key=lambda index: self.ends[index]):
            of_root.setdefault(self.path(index)[0], []).append(index)
        return sorted(of_root.values(), key=min)

    def with_few_copies(self, indices: list[int]) -> list[list[int]]:
        """The same sequences, in halves of halves until no part has more copies than MAX_COPIES allows."""
        if self._has_few_copies(indices):
            return [indices]
        middle = len(indices) // 2
        return [*self.with_few_copies(indices[:middle]), *self.with_few_copies(indices[middle:])]

    def _has_few_copies(self, indices: Sequence[int]) -> bool:
        # n sequences of a family have at most 2n - 1 segments. The first one copies nothing, each other one fewer rows
        # than they have together.
        if 2 * (len(indices) - 1) <= MAX_COPIES:
            return True
        return copied_rows(lay_out(self, indices).segments) <= MAX_COPIES * self.rows(indices)

    def fits(self, indices: Sequence[int], budget: int) -> bool:
        """Whether sequences may run together: at most `budget` rows, with few copies; or one sequence."""
        return len(indices) <= 1 or (self.rows(indices) <= budget and self._has_few_copies(indices))

    def cut(self, budget: int, among: Collection[int] | None = None) -> list[list[int]]:
        """Parts of ascending indices, each of which fits. A family is cut only if it does not fit. among: the sequences
        to cut; None: all."""
        if among is None or len(among) == len(self.ends):
            return self._cut(self.families, budget)
        wanted = set(among)
        families = ([index for index in family if index in wanted] for family in self.families)
        return self._cut([family for family in families if family], budget)

    def cut_family(self, family: list[int], budget: int) -> list[list[int]]:
        """One family, in the order of its tree, as `cut`."""
        return self._cut([family], budget)

    def _cut(self, families: Sequence[list[int]], budget: int) -> list[list[int]]:
        runs = _Runs(self, budget)
        for family in families:
            for number, together in enumerate(self.with_few_copies(family)):
                if number:
                    runs.close()
                if self.rows(together) <= budget:
                    runs.keep_together(together)
                for index in together:
                    runs.add(index)
        return runs.done()


class _Runs:
    """Fills parts one after the other."""

    def __init__(self, tree: PrefixTree, budget: int) -> None:
        self._tree, self._budget = tree, budget
        self._parts: list[list[int]] = []
        self._nodes: set[int] = set()
        self._rows = 0

    def keep_together(self, family: Sequence[int]) -> None:
        """Begin a new part if this one has no room for the family."""
        if self._rows + self._tree.rows(family) > self._budget:
            self.close()

    def close(self) -> None:
        """Begin a new part."""
        self._nodes, self._rows = set(), 0

    def add(self, index: int) -> None:
        path = self._tree.path(index)
        more = self._more(path)
        if self._nodes and self._rows + more > self._budget:
            self.close()
            more = self._more(path)
        if not self._nodes:
            self._parts.append([])
        self._parts[-1].append(index)
        self._nodes.update(path)
        self._rows += more

    def _more(self, path: Sequence[int]) -> int:
        return sum(self._tree.nodes[node].rows for node in path if node not in self._nodes)

    def done(self) -> list[list[int]]:
        return [sorted(piece) for part in self._parts for piece in self._tree.with_few_copies(part)]


def prefix_tree(data: Sequence[Datum]) -> PrefixTree:
    """The tree of the sequences' common prefixes.

    A radix tree: sorted sequences, and the lengths of common prefixes of neighbours, give its branches. A branch that
    would save fewer than MIN_SAVED_ROWS rows is not made; its sequences have their own rows after the branch above.
    """
    of_data = contents(data)
    keys = [array.astype(">i8").tobytes() for array in of_data]
    order = sorted(range(len(data)), key=lambda index: keys[index])
    common = np.array([0, *(_common(of_data[a], of_data[b]) for a, b in zip(order, order[1:], strict=False))])
    nodes: list[Node] = []
    ends = [-1] * len(data)
    # Runs [low, high) of the sorted sequences still to be placed below a node that holds their first `depth` rows.
    # They have more than `level` rows in common.
    waiting = _runs(0, len(order), -1, 0, 0, common, order)
    while waiting:
        low, high, parent, depth = waiting.pop()
        first = min(order[low:high])
        if high - low == 1:
            if len(of_data[first]) > depth:
                nodes.append(Node(parent, depth, len(of_data[first]), first))
                parent = len(nodes) - 1
            ends[first] = parent
            continue
        level = int(common[low + 1 : high].min())
        if (high - low - 1) * (level - depth) >= MIN_SAVED_ROWS:
            nodes.append(Node(parent, depth, level, first))
            parent, depth = len(nodes) - 1, level
        waiting += _runs(low, high, parent, depth, level, common, order)
    return PrefixTree(tuple(nodes), tuple(ends))


def _runs(
    low: int, high: int, parent: int, depth: int, level: int, common: np.ndarray, order: Sequence[int]
) -> list[tuple[int, int, int, int]]:
    """The parts of a run whose sequences have more than `level` rows in common: the part with the earliest sequence
    comes last, to be taken first."""
    cuts = [low, *(low + 1 + np.flatnonzero(common[low + 1 : high] <= level)), high]
    parts = [(int(a), int(b), parent, depth) for a, b in zip(cuts, cuts[1:], strict=False)]
    return sorted(parts, key=lambda part: -min(order[part[0] : part[1]]))


def _common(one: npt.NDArray[np.int64], other: npt.NDArray[np.int64]) -> int:
    """The number of leading rows that are equal."""
    length = min(len(one), len(other))
    differ = (one[:length] != other[:length]).any(axis=1)
    place = int(differ.argmax()) if length else 0
    return place if length and differ[place] else length


@dataclass(frozen=True)
class Layout:
    """The rows of some sequences of a tree, each once. `segments`: they cover all rows, in order. Parents come before
    children, and the children of one parent one after the other, the longest first. `rows_of`: for each sequence, int64
    [N], its rows."""

    segments: tuple[RowRange, ...]
    rows_of: tuple[npt.NDArray[np.int64], ...]

    @property
    def rows(self) -> int:
        return sum(segment.rows for segment in self.segments)

    def of_rows(self, arrays: Iterable[npt.NDArray[Any]]) -> npt.NDArray[Any]:
        """Arrays [N, ...] of the sequences, equal where rows are shared, as one array [rows, ...]."""
        found: npt.NDArray[Any] | None = None
        for rows, array in zip(self.rows_of, arrays, strict=True):
            if found is None:
                found = np.empty((self.rows, *array.shape[1:]), array.dtype)
            found[rows] = array
        assert found is not None
        return found


def lay_out(tree: PrefixTree, indices: Sequence[int]) -> Layout:
    """The rows of some sequences. A node with one branch makes one segment with it."""
    paths = [tree.path(index) for index in indices]
    chains, parents = _chains(tree, sorted({node for path in paths for node in path}))
    sizes = [sum(tree.nodes[node].rows for node in chain) for chain in chains]
    children: dict[int, list[int]] = {}
    for number, parent in enumerate(parents):
        children.setdefault(parent, []).append(number)
    segments: list[RowRange] = []
    rows: dict[int, npt.NDArray[np.int64]] = {}
    # The chains whose children have no segments yet, with their own segments. The list grows while the loop runs.
    first, waiting = 0, [(-1, -1)]
    for chain, parent in waiting:
        for number in sorted(children.get(chain, ()), key=lambda number: -sizes[number]):
            waiting.append((number, len(segments)))
            segments.append(RowRange(first, sizes[number], parent, tree.nodes[chains[number][0]].start))
            for node in chains[number]:
                rows[node] = np.arange(first, first := first + tree.nodes[node].rows)
    return Layout(tuple(segments), tuple(np.concatenate([rows[node] for node in path]) for path in paths))


def _chains(tree: PrefixTree, used: Sequence[int]) -> tuple[list[list[int]], list[int]]:
    """Nodes, ascending, as chains: a node's only child is in its chain. Returns chains and their parent chains."""
    branches = dict.fromkeys(used, 0)
    for node in used:
        if (parent := tree.nodes[node].parent) >= 0:
            branches[parent] += 1
    chains: list[list[int]] = []
    parents: list[int] = []
    of_node: dict[int, int] = {-1: -1}
    for node in used:
        parent = tree.nodes[node].parent
        if parent >= 0 and branches[parent] == 1:
            of_node[node] = of_node[parent]
            chains[of_node[node]].append(node)
        else:
            of_node[node] = len(chains)
            chains.append([node])
            parents.append(of_node[parent])
    return chains, parents


def experts_of(data: Sequence[Datum]) -> Iterator[npt.NDArray[np.int32]] | None:
    """The routed experts of one sequence after the other, int32 [N, layers * k]; -1 for sequences without. None if no
    sequence has them. `data`: of `with_sorted_experts`. They become int32 one at a time: together they need two or four
    times the memory of packed ones."""
    given = [datum.loss_inputs.get(FIELD) for datum in data]
    width = next((experts.shape[1] * experts.shape[2] for experts in given if experts is not None), None)
    if width is None:
        return None
    return (
        np.full((len(datum.tokens), width), UNRECORDED, np.int32)
        if experts is None
        else np.ascontiguousarray(signed(experts).reshape(-1, width), np.int32)
        for datum, experts in zip(data, given, strict=True)
    )
