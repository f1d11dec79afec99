"""Sequences at which the loss of a pass has no gradient: they run apart, without a backward.

Groups of RL whose answers all have the same reward are such. Their logprobs and metrics are computed as those of
others. Where they begin as others do, those rows are computed twice; the choice with the least work is made. It follows
from what runs as one alone. Knows sequences, losses and common prefixes. Knows nothing of how rows are computed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations

import torch

from skyrl.training.backends.base import Datum
from skyrl.training.backends.torch_lora.losses import Loss
from skyrl.training.backends.torch_lora.prefixes import PrefixTree

BACKWARD = 1.0
"""What the backward of a row costs beside its forward: the gradient of each product's input, as many operations. Layers
that are recomputed, and weights that are trained, cost more."""
SAVED_ON_CPU, SAVED_ON_CUDA = 64, 4096
"""Sequences run apart if that saves as much as so many rows' forward: a micro-batch more has costs of its own. A GPU's
are those of starting its operations (`row_budget`)."""

Ways = frozenset[float]
"""Where rows are computed, as the costs of a row there: `WITH`, `WITHOUT` a backward, or both."""
WITH, WITHOUT = 1 + BACKWARD, 1.0
_WAYS: list[Ways] = [frozenset(each) for size in (1, 2) for each in combinations((WITH, WITHOUT), size)]


def is_trained(datum: Datum, loss: Loss) -> bool:
    """Whether the loss may have a gradient at a sequence."""
    if loss.trained is None:
        return True
    given = datum.loss_inputs.get(loss.trained)
    return bool(loss.optional.get(loss.trained, 0.0)) if given is None else bool(given.any())


def divided(tree: PrefixTree, trained: Sequence[bool], device: torch.device) -> tuple[Sequence[int], Sequence[int]]:
    """The indices of sequences that run with a backward, and of those that run without. trained: of each sequence."""
    every = range(len(trained))
    if all(trained):
        return every, []
    ways = _cheapest(tree, {tree.ends[index] for index in every if trained[index]})
    without = [index for index in every if not trained[index] and WITHOUT in ways[tree.ends[index]]]
    with_backward = sorted({*every} - {*without})
    saved = WITH * (tree.rows(every) - tree.rows(with_backward)) - WITHOUT * tree.rows(without)
    least = SAVED_ON_CUDA if device.type == "cuda" else SAVED_ON_CPU
    return (with_backward, without) if saved >= least else (every, [])


def _cheapest(tree: PrefixTree, trained_ends: set[int]) -> list[Ways]:
    """For each node of the tree where its rows are computed: where all of its sequences are. Costs come from the leaves
    up, as nodes come after their parents; then each node takes the cheapest of what its parent has."""
    own = [
        {ways: math.inf if node in trained_ends and WITH not in ways else rows.rows * sum(ways) for ways in _WAYS}
        for node, rows in enumerate(tree.nodes)
    ]

    def best(node: int, among: Ways) -> Ways:
        return min((ways for ways in _WAYS if ways <= among), key=own[node].__getitem__)

    for node in reversed(range(len(tree.nodes))):
        if (parent := tree.nodes[node].parent) >= 0:
            for ways in _WAYS:
                own[parent][ways] += own[node][best(node, ways)]
    chosen: list[Ways] = []
    for node, rows in enumerate(tree.nodes):
        chosen.append(best(node, chosen[rows.parent] if rows.parent >= 0 else frozenset((WITH, WITHOUT))))
    return chosen
