"""A turn while it is sampled: what is there of its answer, for any number of readers.

A turn goes on when its reader goes: a client whose connection broke asks again, and gets the same answer. It ends with
its session.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from skyrl.base.types.agents import AgentTurn
from skyrl.base.wire.errors import RequestError


class RunningTurn:
    """`parent` is the turn that it continues, `tokens` the most that it can add to the session's. With `streams` the
    inference server streams the answer."""

    def __init__(self, turn_id: str, parent: AgentTurn | None, *, tokens: int, n: int, streams: bool) -> None:
        self.id = turn_id
        self.parent = parent
        self.tokens = tokens
        self.n = n
        self.streams = streams
        self.turns: Sequence[AgentTurn] = ()
        """The stored turns, one for each choice, once the answer is complete."""
        self.body: bytes | None = None
        """The whole answer, once it is complete, if the inference server did not stream it."""
        self.is_complete = False
        """Whether the answer is complete: it is stored next, and then its end goes to the readers."""
        self.task: asyncio.Task[None] | None = None
        """What samples the answer."""
        self.stopped: RequestError | None = None
        """Why the turn was ended before its answer was complete."""
        self._readers = 0
        self._had_readers = False
        self._chunks: list[bytes] = []
        self._error: RequestError | None = None
        self._ended = False
        self._waiting: list[asyncio.Future[None]] = []

    @property
    def left(self) -> bool:
        """Its clients have gone. One that has only just asked, and reads nothing yet, has not."""
        return self._had_readers and not self._readers

    def push(self, chunks: Sequence[bytes]) -> None:
        """Add chunks of a streamed answer."""
        self._chunks += chunks
        self._wake()

    def end(self, turns: Sequence[AgentTurn], body: bytes | None) -> None:
        self.turns, self.body, self._ended = turns, body, True
        self._wake()

    def stop(self, reason: RequestError) -> None:
        """End the turn, and with it its request to the inference server, unless its answer is complete."""
        if not self.is_complete and self.stopped is None and self.task is not None:
            self.stopped = reason
            self.task.cancel()

    def fail(self, error: RequestError) -> None:
        """Each reader gets this error."""
        self._error, self._ended = error, True
        self._wake()

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """The chunks of a streamed answer, from the first. Raises RequestError."""
        self._came()
        try:
            seen = 0
            while True:
                while seen < len(self._chunks):
                    seen += 1
                    yield self._chunks[seen - 1]
                if self._ended:
                    break
                await self._changed()
            if self._error is not None:
                raise self._error
        finally:
            self._readers -= 1

    async def wait(self) -> None:
        """Returns at the end of the answer. Raises RequestError."""
        self._came()
        try:
            while not self._ended:
                await self._changed()
            if self._error is not None:
                raise self._error
        finally:
            self._readers -= 1

    def _came(self) -> None:
        self._readers += 1
        self._had_readers = True

    async def _changed(self) -> None:
        waiting = asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        await waiting

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            if not each.done():
                each.set_result(None)
