"""Which sequences of a pass are divided over all ranks, and what is left of the pass.

Knows lengths and token ids. Knows nothing of how parts of a sequence are computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from skyrl.training.backends.base import Datum
from skyrl.training.backends.torch_lora.prefixes import Node, PrefixTree, prefix_tree

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
