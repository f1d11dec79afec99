"""The pauses between the tries of a request, until its deadline.

Knows the state of a request, and asks servers for their health. Knows nothing of why a try has failed.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Collection, Mapping
from typing import Any

from skyrl.base.wire.errors import FailedRequest
from skyrl.runtime.processes.backoff import Backoff
from skyrl.server.sampling.attempts import Attempts
from skyrl.server.sampling.endpoint import Endpoint
from skyrl.server.sampling.error_messages import server_failure
from skyrl.server.sampling.health import Health, health_of
from skyrl.server.sampling.progress import SampleWait
from skyrl.server.sampling.transport import CompletionTransport

FIRST_BACKOFF_S = 0.05
MAX_BACKOFF_S = 1.0
MAX_GATEWAY_BACKOFF_S = 5.0
"""After 502 and 504. A proxy also gives these answers for a sample that kills the server, so the pauses are longer."""
MAX_RETRY_AFTER_S = 30.0
MAX_DYING_S = 5.0


def backoff() -> Backoff:
    """The pauses of a new request."""
    return Backoff(FIRST_BACKOFF_S, MAX_BACKOFF_S, jitter=0.25)


class Waits:
    """`replicas` are the URLs of the servers behind skyrl's own router; the caller may change them. `deadline_s` is how
    long a request may take, for the message when it took longer."""

    def __init__(
        self, transport: CompletionTransport, headers: Mapping[str, str], replicas: Collection[str], deadline_s: float
    ) -> None:
        self._transport = transport
        self._headers = headers
        self._replicas = replicas
        self._deadline_s = deadline_s

    async def back_off(
        self,
        attempts: Attempts[Any],
        retry_after_s: float = 0.0,
        waits_for: SampleWait = SampleWait.AWAY,
        *,
        is_long: bool = False,
    ) -> None:
        """Wait, longer each time: this time at least `retry_after_s`, up to MAX_RETRY_AFTER_S. With `is_long` pauses
        grow up to MAX_GATEWAY_BACKOFF_S.

        Raises FailedRequest if the wait would end after the deadline.
        """
        now = asyncio.get_running_loop().time
        attempts.wait_for(waits_for, now())
        pause_s = attempts.backoff.pause(MAX_GATEWAY_BACKOFF_S if is_long else None)
        wait_s = max(pause_s, min(retry_after_s, MAX_RETRY_AFTER_S) * random.uniform(1.0, 1.25))
        if now() + wait_s > attempts.deadline:
            raise self.deadline_failure(attempts)
        await asyncio.sleep(wait_s)

    async def wait_out_death(self, server: Endpoint, attempts: Attempts[Any]) -> None:
        """Wait at least one pause, and then until the server is not dying: it would fail a request that is sent now.

        A dying vLLM fails all requests in flight with 500 or a reset, and exits within about a second.
        """
        await self.back_off(attempts)
        await self.wait_while_dying(server, attempts)

    async def wait_while_dying(self, server: Endpoint, attempts: Attempts[Any]) -> None:
        """For a replica behind the router at most MAX_DYING_S: if it hangs, the router sends the sample elsewhere."""
        now = asyncio.get_running_loop().time
        until = now() + MAX_DYING_S if server.url in self._replicas else attempts.deadline
        while await health_of(self._transport, server, self._headers) is Health.DYING and now() < until:
            await self.back_off(attempts)

    def deadline_failure(self, attempts: Attempts[Any]) -> FailedRequest:
        return server_failure(f"gave up after {self._deadline_s:g} s: {attempts.trouble}")
