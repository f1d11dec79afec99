"""The rows of a trajectory: its tree of turns as sequences to train on.

A row is the path from a first turn to a turn that nothing continues. Each sampled token is trained in one row, the
first that has it: the part that forks share is context in the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from skyrl.base.types.agents import AgentTurn
from skyrl.server.agents.tree import Tree


@dataclass(frozen=True, slots=True)
class TrainedTurn:
    """A turn of a row: its sampled tokens are those from `start` to `stop`. `trained` is False where an earlier row
    trains them, and where their logprobs are a grammar's (`AgentTurn.own_logprobs`)."""

    turn: AgentTurn
    start: int
    stop: int
    trained: bool


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """`tokens` are ids (int32), `mask` says which are trained, `logprobs` (float32) are those under which tokens were
    sampled, 0 where a token is not trained, `constrained` (bool) says of which a grammar has narrowed the choice; all
    of shape [tokens]. The logprob of a constrained token is the model's own. Where that is not known, all tokens of the
    turn count as constrained, and none is trained."""

    tokens: NDArray[np.int32]
    mask: NDArray[np.bool_]
    logprobs: NDArray[np.float32]
    constrained: NDArray[np.bool_]
    turns: Sequence[TrainedTurn]

    @property
    def prompt(self) -> int:
        """The number of tokens before the first that was sampled."""
        return self.turns[0].start

    @property
    def template_note(self) -> str | None:
        """How the model's template writes a part of the row otherwise; None if the row is as it writes it."""
        return next((each.turn.template_note for each in self.turns[1:] if each.turn.template_note), None)

    @property
    def versions(self) -> list[str]:
        """The weights of each token after the prompt; empty for tokens that were not sampled."""
        versions = [""] * (len(self.tokens) - self.prompt)
        for each in self.turns:
            spans = each.turn.versions
            stops = [*(span.first for span in spans[1:]), each.stop - each.start]
            for span, stop in zip(spans, stops, strict=True):
                at = each.start - self.prompt
                versions[at + span.first : at + stop] = [span.version] * (stop - span.first)
        return versions


def ends_of(tree: Tree) -> list[AgentTurn]:
    """The turns that nothing continues, in the order in which they ended: each is the end of a row."""
    return [turn for turn in tree if not tree.has_child(turn)]


def rows_of(tree: Tree, ends: Sequence[AgentTurn], offset: int, limit: int) -> list[Row]:
    """The rows number `offset` and after, at most `limit`, of those that end with `ends`."""
    seen: set[str] = set()
    for end in ends[:offset]:
        seen.update(turn.id for turn in tree.path(end))
    return [_row(tree.path(end), seen) for end in ends[offset : offset + limit]]


def _row(path: Sequence[AgentTurn], seen: set[str]) -> Row:
    """Adds the turns of the path to `seen`."""
    parts: list[NDArray[np.int32]] = []
    masks: list[NDArray[np.bool_]] = []
    logprobs: list[NDArray[np.float32]] = []
    constrained: list[NDArray[np.bool_]] = []
    turns: list[TrainedTurn] = []
    at = 0
    for turn in path:
        trained = turn.id not in seen and turn.own_logprobs
        seen.add(turn.id)
        start = at + len(turn.added)
        at = start + len(turn.sampled)
        turns.append(TrainedTurn(turn, start, at, trained))
        parts += [turn.added, turn.sampled]
        masks += [np.zeros(len(turn.added), np.bool_), np.full(len(turn.sampled), trained)]
        given = turn.logprobs if trained else np.zeros(len(turn.sampled), np.float32)
        logprobs += [np.zeros(len(turn.added), np.float32), given]
        constrained += [np.zeros(len(turn.added), np.bool_), _constrained(turn)]
    return Row(
        np.concatenate(parts), np.concatenate(masks), np.concatenate(logprobs), np.concatenate(constrained), turns
    )


def _constrained(turn: AgentTurn) -> NDArray[np.bool_]:
    if turn.constrained is not None and turn.own_logprobs:
        return turn.constrained
    return np.full(len(turn.sampled), not turn.own_logprobs)
