"""A compressed radix tree over text. Nodes carry marks: the positions at which a stored trajectory may be cut.

It knows neither tokens nor bounds. A lookup walks along the text, so its cost depends on the length of the text and not
on the number of stored texts. Nodes split in text; a mark moves with its text, so that no token is ever divided.
"""

from __future__ import annotations

from collections.abc import Iterator

from skyrl.router.radix.trajectory import Node, Trajectory


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
