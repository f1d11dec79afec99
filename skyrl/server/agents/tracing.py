"""The span of a turn, if its request is traced: a child of the request's span, and the parent of `forward`.

It has counts and reasons, and neither messages nor tokens.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextvars import Token
from types import TracebackType

from skyrl.base.types.agents import AgentTurn
from skyrl.runtime.tracing import Attribute, OpenSpan, RequestTrace, current_trace


class TurnSpan:
    """While it is entered, the spans of this task are the turn's children. The turn began `own_s` (seconds) ago: that
    time went into its place and its tokens."""

    def __init__(self, session_id: str, turn_id: str, own_s: float) -> None:
        self._about: dict[str, Attribute] = {
            "skyrl.agent_session_id": session_id,
            "skyrl.turn_id": turn_id,
            "skyrl.own_s": own_s,
        }
        self._own_s = own_s
        self._open: tuple[OpenSpan, Token[RequestTrace | None]] | None = None

    def __enter__(self) -> TurnSpan:
        if (trace := current_trace.get()) is not None:
            span = trace.child("turn", start_ns=time.time_ns() - int(self._own_s * 1e9))
            self._open = span, current_trace.set(trace.within(span))
        return self

    def answered(self, turns: Sequence[AgentTurn]) -> None:
        """The answer is complete: its turns, one for each choice."""
        first = turns[0]
        self._about |= {
            "skyrl.dialect": first.dialect,
            "skyrl.prompt_tokens": first.usage["prompt"],
            "skyrl.cached_tokens": first.usage["cached"],
            "skyrl.added_tokens": len(first.added),
            "skyrl.sampled_tokens": sum(len(turn.sampled) for turn in turns),
        }
        if first.fork is not None:
            self._about["skyrl.fork"] = first.fork
        if first.forked_at is not None:
            self._about["skyrl.forked_at"] = first.forked_at

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._open is not None:
            span, token = self._open
            current_trace.reset(token)
            span.end(self._about, None if kind is None else kind.__name__)
