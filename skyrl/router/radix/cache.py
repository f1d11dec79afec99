"""The cache of trajectories: which tokens stand for a text. It bounds bytes and weight versions.

What `text` -> tokens means: the longest stored prefix of the text that ends at a cut gives its tokens; the remainder is
tokenised. A cut lies after a token of a sampled span, never in text that was only tokenised. All tokens of a prefix
come from one trajectory: two tokenisations of one text are never mixed. Text alone cannot tell two samplings of the
same text apart; of several trajectories with the same longest prefix the one stored last answers, with its logprobs.

`Tree` is a compressed radix tree over text. Its nodes carry marks: the positions at which a stored trajectory may be
cut. A lookup walks along the text, so its cost depends on the length of the text and not on the number of stored texts.
Nodes split in text; a mark moves with its text, so that no token is ever divided.

The cache knows neither HTTP nor the tokenizer's files: `encode` turns text into token ids. The tree knows neither
tokens nor bounds."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import NamedTuple

from skyrl.router.radix.trajectory import Cut, Node, Sample, Tokens, Trajectory


class Tree:
    """`bytes` estimates what the nodes occupy."""

    def __init__(self) -> None:
        self.root = Node(None, 0, "")
        self.bytes = 0

    def best(self, text: str) -> tuple[Trajectory, int] | None:
        """The longest marked prefix of `text`: its newest trajectory and its length in characters."""
        node, matched = self._walk(text)
        while node is not None:
            position = _last_mark(node, matched)
            if position is not None:
                mark = node.marks[position]
                return (mark if isinstance(mark, Trajectory) else next(reversed(mark))), position
            matched, node = node.start, node.parent
        return None

    def final(self, text: str) -> Trajectory | None:
        """The newest trajectory whose text is `text`."""
        node, matched = self._walk(text)
        return next(reversed(node.finals)) if matched == len(text) == node.end and node.finals else None

    def add(self, text: str, final: int, trajectory: Trajectory) -> None:
        """Store the path of `text`, the trajectory's marks, and that its text ends at character `final`."""
        begin = self._boundary(text, trajectory.start)
        begin.pins += 1
        trajectory.final = self._boundary(text, final)
        trajectory.final.finals[trajectory] = None
        trajectory.end = self._boundary(text, len(text))
        trajectory.end.pins += 1
        positions = len(trajectory.positions) - 1
        node: Node = trajectory.end
        while positions >= 0:
            while node.start >= trajectory.positions[positions]:
                assert node.parent is not None
                node = node.parent
            _mark(node, trajectory.positions[positions], trajectory)
            positions -= 1

    def remove(self, trajectory: Trajectory) -> None:
        """Remove its marks and the nodes that nobody needs any more."""
        if trajectory.end is None or trajectory.final is None:
            return
        path = list(_up_to(trajectory.end, trajectory.start))
        positions = len(trajectory.positions) - 1
        for node in path:
            while positions >= 0 and trajectory.positions[positions] > node.start:
                _unmark(node, trajectory.positions[positions], trajectory)
                positions -= 1
        del trajectory.final.finals[trajectory]
        trajectory.end.pins -= 1
        path[-1].pins -= 1
        trajectory.end = trajectory.final = None
        for node in path:
            self._tidy(node)

    def _walk(self, text: str) -> tuple[Node, int]:
        """The deepest node that shares text with `text`, and the number of shared characters."""
        node, at = self.root, 0
        while at < len(text):
            child = node.children.get(text[at])
            if child is None:
                break
            if text.startswith(child.edge, at):
                node, at = child, at + len(child.edge)
                continue
            return child, at + _common(child.edge, text, at)
        return node, at

    def _boundary(self, text: str, position: int) -> Node:
        """The node that ends at `position` of `text`; it is made, or split off, if there is none."""
        node, at = self._walk(text[:position])
        if at < node.end:
            node = self._split(node, at)
        if at < position:
            child = Node(node, at, text[at:position])
            node.children[text[at]] = child
            self.bytes += child.bytes
            node = child
        return node

    def _split(self, node: Node, position: int) -> Node:
        """Make a node of the text before `position`. `node` stays the lower one: trajectories refer to it as an end."""
        assert node.parent is not None
        self.bytes -= node.bytes
        cut = position - node.start
        upper = Node(node.parent, node.start, node.edge[:cut])
        node.parent.children[upper.edge[0]] = upper
        node.parent, node.start, node.edge = upper, position, node.edge[cut:]
        upper.children[node.edge[0]] = node
        marks = node.marks
        upper.marks = {at: mark for at, mark in marks.items() if at <= position}
        node.marks = {at: mark for at, mark in marks.items() if at > position}
        self.bytes += upper.bytes + node.bytes
        return upper

    def _tidy(self, node: Node) -> None:
        """Remove `node` and its ancestors while they are empty; join a node with its only child."""
        while node.parent is not None and not (node.children or node.marks or node.finals or node.pins):
            parent, node.parent = node.parent, None
            self.bytes -= node.bytes
            if parent.children.get(node.edge[0]) is node:
                del parent.children[node.edge[0]]
            node = parent
        if node.parent is None or node.finals or node.pins or len(node.children) != 1:
            return
        child = next(iter(node.children.values()))
        self.bytes -= node.bytes + child.bytes
        child.parent, child.start, child.edge = node.parent, node.start, node.edge + child.edge
        child.parent.children[child.edge[0]] = child
        child.marks.update(node.marks)
        node.parent, node.children = None, {}
        self.bytes += child.bytes


def _last_mark(node: Node, matched: int) -> int | None:
    """The last marked position of `node` up to `matched`."""
    if len(node.marks) < matched - node.start:
        return max((position for position in node.marks if position <= matched), default=None)
    return next((position for position in range(matched, node.start, -1) if position in node.marks), None)


def _mark(node: Node, position: int, trajectory: Trajectory) -> None:
    mark = node.marks.get(position)
    if mark is None:
        node.marks[position] = trajectory
    elif isinstance(mark, dict):
        mark[trajectory] = None
    else:
        node.marks[position] = {mark: None, trajectory: None}


def _unmark(node: Node, position: int, trajectory: Trajectory) -> None:
    mark = node.marks[position]
    if isinstance(mark, dict):
        del mark[trajectory]
        if mark:
            return
    del node.marks[position]


def _up_to(node: Node, start: int) -> Iterator[Node]:
    """From `node` upwards to the node that ends at `start`."""
    while node.end > start:
        yield node
        assert node.parent is not None
        node = node.parent
    yield node


def _common(edge: str, text: str, at: int) -> int:
    """The number of leading characters of `edge` that `text` has at `at`, by bisection: slices compare fast."""
    low, high = 0, min(len(edge), len(text) - at)
    while low < high:
        middle = (low + high + 1) // 2
        if text.startswith(edge[low:middle], at + low):
            low = middle
        else:
            high = middle - 1
    return low


MAX_BYTES = 512 * 2**20
KEPT_VERSIONS = 5
REMEMBERED_VERSIONS = 4096
"""Collected versions whose names are kept, so that a late sample of one of them is not taken for a new version."""


class Prompt(NamedTuple):
    """The tokens of a text that goes to a worker, and the stored trajectory that they continue."""

    text: str
    cut: Cut | None
    tokens: Tokens
    reused: int


class RadixCache:
    """`max_bytes` bounds the estimate of the memory in bytes. Samples of the last `kept_versions` weight versions, in
    the order in which versions first appeared, can be reused. Samples whose version is not known stay until memory is
    needed."""

    def __init__(
        self, encode: Callable[[str], list[int]], max_bytes: int = MAX_BYTES, kept_versions: int = KEPT_VERSIONS
    ) -> None:
        self._encode = encode
        self._max_bytes = max_bytes
        self._kept_versions = kept_versions
        self._tree = Tree()
        # Least recently used first. A trajectory is newer here than those that continue it, so the first has none.
        self._order: OrderedDict[Trajectory, None] = OrderedDict()
        self._versions: OrderedDict[str, dict[Trajectory, None]] = OrderedDict()
        self._collected_versions: OrderedDict[str, None] = OrderedDict()
        self._size = 0
        self.lookups = self.hits = self.hit_tokens = self.total_tokens = self.evictions = self.collected = 0

    @property
    def bytes(self) -> int:
        return self._size + self._tree.bytes

    def __len__(self) -> int:
        return len(self._order)

    def prompt(self, text: str) -> Prompt:
        """The tokens to send for `text`. Counts as a lookup."""
        prompt = self.complete(text, self.find(text))
        self.count(prompt.reused, len(prompt.tokens), hit=prompt.cut is not None)
        return prompt

    def find(self, text: str) -> Cut | None:
        """The cut at the end of the longest stored prefix of `text`; None if nothing of it is stored."""
        best = self._tree.best(text)
        if best is None:
            return None
        trajectory, position = best
        self._touch(trajectory)
        count = trajectory.counts[bisect_left(trajectory.positions, position)]
        return Cut(trajectory, count, position)

    def complete(self, text: str, cut: Cut | None) -> Prompt:
        """The tokens for `text` behind the cut that `find` gave. Slow for a long text. Any thread may call it: it
        changes nothing in the cache. Call `count` behind it."""
        tokens, rest = (Tokens(), text) if cut is None else (cut.trajectory.tokens(cut.count), text[cut.position :])
        reused = len(tokens)
        tokens.add_tokenised(self._encode(rest) if rest else [])
        return Prompt(text, cut, tokens, reused)

    def count(self, reused: int, tokens: int, *, hit: bool) -> None:
        """Count a lookup that gave so many tokens, `reused` of them stored ones."""
        self.lookups += 1
        self.hits += hit
        self.hit_tokens += reused
        self.total_tokens += tokens

    def whole(self, text: str) -> Trajectory | None:
        """The newest trajectory whose text is `text`. If there is one, this counts as a lookup."""
        final = self._tree.final(text)
        if final is not None:
            self._touch(final)
            self.count(final.count, final.count, hit=True)
        return final

    def store(self, prompt: Prompt, sample: Sample, version: str | None) -> bool:
        """Store a sample that continues `prompt`. False if its weight version is already collected."""
        if not sample.ids or not (version is None or self._see(version)):
            return False
        parent, before = prompt.cut, prompt.tokens
        if parent is not None and parent.trajectory.alive:
            before = before.after(prompt.reused)
            parent.trajectory.children += 1
        else:
            parent = None  # evicted while the worker sampled: the new trajectory owns a copy
        trajectory = Trajectory(parent, before, len(prompt.text), sample, version)
        text = prompt.text + sample.text
        self._tree.add(text + sample.tail, len(text), trajectory)
        self._size += trajectory.size
        if version is not None:
            self._versions[version][trajectory] = None
        self._order[trajectory] = None
        self._touch(trajectory)
        while self.bytes > self._max_bytes and self._order:
            self._drop(next(iter(self._order)))
            self.evictions += 1
        return True

    def stats(self) -> dict[str, int | float]:
        return {
            "lookups": self.lookups,
            "hits": self.hits,
            "hit_tokens": self.hit_tokens,
            "total_tokens": self.total_tokens,
            "hit_rate": self.hit_tokens / self.total_tokens if self.total_tokens else 0.0,
            "bytes": self.bytes,
            "entries": len(self._order),
            "evictions": self.evictions,
            "collected": self.collected,
        }

    def _touch(self, trajectory: Trajectory) -> None:
        """Mark it used, and after it what it continues: so an ancestor is always newer than its descendants."""
        current: Trajectory | None = trajectory
        while current is not None:
            self._order.move_to_end(current)
            current = current.parent.trajectory if current.parent else None

    def _see(self, version: str) -> bool:
        if version in self._versions:
            return True
        if version in self._collected_versions:
            return False
        self._versions[version] = {}
        while len(self._versions) > self._kept_versions:
            old, trajectories = self._versions.popitem(last=False)
            self._collected_versions[old] = None
            if len(self._collected_versions) > REMEMBERED_VERSIONS:
                self._collected_versions.popitem(last=False)
            for trajectory in trajectories:
                self._retire(trajectory)
        return True

    def _retire(self, trajectory: Trajectory) -> None:
        """Its text is not found any more. Its tokens stay while a newer trajectory continues them."""
        self._tree.remove(trajectory)
        trajectory.retired = True
        if not trajectory.children:
            self._drop(trajectory)
        self.collected += 1

    def _drop(self, trajectory: Trajectory | None) -> None:
        while trajectory is not None:
            self._tree.remove(trajectory)
            self._order.pop(trajectory)
            if trajectory.version is not None:
                self._versions.get(trajectory.version, {}).pop(trajectory, None)
            self._size -= trajectory.size
            trajectory.alive = False
            if trajectory.parent is None:
                return
            parent = trajectory.parent.trajectory
            parent.children -= 1
            trajectory = parent if parent.retired and not parent.children else None
