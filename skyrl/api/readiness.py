"""What the API process knows of the engine: the state row, read again at every ring and every few seconds."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from skyrl.db.engine_state import EngineState
from skyrl.sampling.job import Limits

POLL_S = 2.0
STALE_S = 15.0
"""The engine beats every 3 s from a thread of its own, so 15 s without a beat is an engine that is gone."""


class EngineWatch:
    """A cached reading of engine_state and what follows from it."""

    def __init__(self, read: Callable[[], Awaitable[EngineState]], *, trains: bool, manages_inference: bool) -> None:
        self._read = read
        self._trains = trains
        self._manages_inference = manages_inference
        self.state = EngineState()

    async def refresh(self) -> EngineState:
        self.state = await self._read()
        return self.state

    def limits(self) -> Limits:
        return Limits(self.state.vocab_size, self.state.max_context)

    def adapters_in(self, own: Path) -> Path:
        """The state directory that adapters lie in: this server's `own`, or, for a gateway, that of the server that
        trains on the same database."""
        return own if self._trains or self.state.state_dir is None else Path(self.state.state_dir)

    def reasons(self) -> list[str]:
        """Why the server cannot train or sample right now; empty when it can."""
        reasons: list[str] = []
        state = self.state
        if self._trains:
            if not state.training_ready:
                reasons.append(f"training: {state.reason or 'the engine is starting'}")
            elif time.time() - state.heartbeat_at > STALE_S:
                reasons.append(f"training: the engine was last heard of {time.time() - state.heartbeat_at:.0f} s ago")
        if self._manages_inference and state.inference_proxy_url is None:
            reasons.append("sampling: no inference server has been published")
        return reasons
