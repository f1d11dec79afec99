"""Spans of commands: how long each waited, ran, and was repeated after a restart.

The trace is stored with the command, so that the spans of every engine that works on it join the same trace.
"""

from __future__ import annotations

import time

from skyrl.base.types.requests import Command
from skyrl.runtime.tracing import RequestTrace, Spans, stored_context


class CommandTracing:
    """`spans` is None where nothing is traced. Times are in seconds since the epoch."""

    def __init__(self, spans: Spans | None = None) -> None:
        self._spans = spans

    def ran(self, command: Command, began_at: float, error: str | None) -> None:
        """A command has run since `began_at`, and is settled."""
        if (trace := self._trace(command)) is None:
            return
        now = time.time_ns()
        began_ns = int(began_at * 1e9)
        trace.record("queue", int(command.accepted_at * 1e9), began_ns, _attributes(command))
        trace.record("run", began_ns, now, _attributes(command), error)

    def repeated(self, command: Command, began_at: float) -> None:
        """A command that had run before was repeated since `began_at`, because the engine has restarted."""
        if (trace := self._trace(command)) is not None:
            about = _attributes(command) | {"skyrl.replayed": True}
            trace.record("repeat", int(began_at * 1e9), time.time_ns(), about)

    def _trace(self, command: Command) -> RequestTrace | None:
        if self._spans is None or (context := stored_context(command.trace)) is None:
            return None
        return RequestTrace(self._spans, context)


def _attributes(command: Command) -> dict[str, str | int | bool]:
    about: dict[str, str | int | bool] = {"skyrl.request_id": command.request_id, "skyrl.kind": str(command.kind)}
    if command.model_id is not None:
        about["skyrl.model_id"] = command.model_id
    if command.seq_id is not None:
        about["skyrl.seq_id"] = command.seq_id
    return about
