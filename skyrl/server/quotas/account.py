"""One tenant's account in an API process: its samples in flight, its tokens, and its requests that wait for tokens.

Knows numbers and turns; does not know the content of a request.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections.abc import Callable

from skyrl.base.wire.errors import OverQuota
from skyrl.server.quotas.bucket import TokenBucket
from skyrl.server.quotas.limits import QuotaLimits

MAX_PAUSE_S = 600.0
"""A sample that would wait for longer is refused."""
MAX_RETRY_S = 60.0
"""The SDK waits at most this long when the server tells it how long to wait."""
SOON_S = 1e-3
"""A request with a shorter wait starts at once."""

_arrivals = itertools.count()


class Ticket:
    """An admitted request. `charged` is the number of tokens taken from `bucket`; None if none can be given back.
    `turn` is the income of the bucket (see TokenBucket) at which the request may start. `not_before` is the estimated
    time of the start in seconds since the epoch; None for a start at once. `used` is the number of tokens that the
    request has used; the holder of the ticket sets it before `end`."""

    __slots__ = ("_account", "_charged", "_turn", "bucket", "not_before", "request_id", "used", "waiter")

    def __init__(
        self,
        account: Account,
        bucket: TokenBucket | None,
        request_id: str,
        charged: int | None,
        turn: float,
        left_s: float,
    ) -> None:
        self._account = account
        self.bucket = bucket
        self._charged = charged
        self._turn = turn
        self.request_id = request_id
        self.not_before = time.time() + left_s if left_s > SOON_S else None
        self.used = 0
        self.waiter: asyncio.Future[None] | None = None

    @property
    def left_s(self) -> float:
        """Seconds until the request may start, if no tokens are given back."""
        return self._account.left_s(self._turn)

    async def wait_turn(self) -> None:
        """Returns when the request may start: enough tokens have come in, or earlier requests gave tokens back."""
        if self.not_before is not None:
            await self._account.wait(self, self._turn)

    def hand_over(self) -> None:
        """The engine runs this sample. It counts as in flight until it has ended; no tokens are given back."""
        self._account.hand_over(self)

    def end(self) -> None:
        """The request has ended, or was not recorded. It is no longer in flight, and its unused tokens go back to the
        bucket. A second call does nothing."""
        unused = 0 if self._charged is None else self._charged - self.used
        self._charged = None
        self._account.leave(self, unused)


class Account:
    """`is_pending` returns whether a request of the engine has not ended. Requests that wait for their turn are put
    into `waiting`, by request id."""

    def __init__(
        self,
        limits: QuotaLimits,
        is_pending: Callable[[str], bool],
        clock: Callable[[], float],
        waiting: dict[str, Ticket],
    ) -> None:
        self.limits = limits
        self._waiting = waiting
        self._is_pending = is_pending
        self._clock = clock
        self._in_flight: set[Ticket] = set()
        self._with_engine: set[str] = set()
        self._bucket: TokenBucket | None = None
        self._queue: list[tuple[float, int, Ticket]] = []
        self._timer: asyncio.TimerHandle | None = None
        self.apply(limits)

    def apply(self, limits: QuotaLimits) -> None:
        """Set new limits. Requests that wait for tokens now wait as the new rate says."""
        rate = limits.tokens_per_minute
        if rate is None:
            self._bucket = None
        elif self._bucket is None:
            self._bucket = TokenBucket(rate, self._clock())
        elif rate != self.limits.tokens_per_minute:
            self._bucket.change_rate(rate, self._clock())
        self.limits = limits
        self._start_due()

    @property
    def idle(self) -> bool:
        """Whether the account can be forgotten: a new account would have the same state."""
        self._forget_ended()
        full = self._bucket is None or self._bucket.full(self._clock())
        return full and not self._in_flight and not self._with_engine

    def admit(self, request_id: str, tokens: int) -> Ticket:
        """Admit a sample that uses at most `tokens`. Raises OverQuota; then nothing is counted."""
        self._check_in_flight()
        if self._bucket is not None and (wait_s := self._bucket.wait_s(tokens, self._clock())) > MAX_PAUSE_S:
            raise OverQuota(
                "tokens_per_minute",
                f"this API key's tenant may use {self.limits.tokens_per_minute} tokens per minute, and has used up "
                f"the tokens of the next {wait_s / 60:.0f} minutes; try again later",
                retry_after_s=min(wait_s - MAX_PAUSE_S, MAX_RETRY_S),
            )
        ticket = self.charge(request_id, tokens)
        self._in_flight.add(ticket)
        return ticket

    def charge(self, request_id: str, tokens: int) -> Ticket:
        """Take tokens for a request, however long it must wait for its turn. Never refuses."""
        if self._bucket is None:
            return Ticket(self, None, request_id, None, 0.0, 0.0)
        turn = self._bucket.take(tokens, self._clock())
        return Ticket(self, self._bucket, request_id, tokens, turn, self.left_s(turn))

    def adopt(self, request_id: str, not_before: float | None) -> Ticket:
        """A sample that another process has admitted. Its tokens were charged there and are not given back here."""
        turn = self.owe(not_before)
        ticket = Ticket(self, self._bucket, request_id, None, turn, self.left_s(turn))
        self._in_flight.add(ticket)
        return ticket

    def owe(self, not_before: float | None) -> float:
        """Let no new request start before `not_before` (seconds since the epoch): a request that was admitted by
        another process, or before this one started, waits until then. Returns the turn of that request."""
        if self._bucket is None or not_before is None:
            return 0.0
        return self._bucket.owe(max(0.0, not_before - time.time()), self._clock())

    def hand_over(self, ticket: Ticket) -> None:
        self._in_flight.discard(ticket)
        self._with_engine.add(ticket.request_id)

    def leave(self, ticket: Ticket, unused: int) -> None:
        self._in_flight.discard(ticket)
        if self._bucket is not None and self._bucket is ticket.bucket and unused:
            self._bucket.give_back(unused, self._clock())
            self._start_due()

    def left_s(self, turn: float) -> float:
        """Seconds until `turn`, if no tokens are given back."""
        return 0.0 if self._bucket is None else self._bucket.left_s(turn, self._clock())

    async def wait(self, ticket: Ticket, turn: float) -> None:
        """Wait until `turn`. Returns at once if the ticket's bucket is gone: its quota has ended, or was set anew."""
        if ticket.bucket is not self._bucket:
            return
        ticket.waiter = asyncio.get_running_loop().create_future()
        self._waiting[ticket.request_id] = ticket
        heapq.heappush(self._queue, (turn, next(_arrivals), ticket))
        self._start_due()
        try:
            await ticket.waiter
        finally:
            del self._waiting[ticket.request_id]

    def _start_due(self) -> None:
        """Start the requests whose turn has come, and set a timer for the next turn."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._queue:
            turn, _, ticket = self._queue[0]
            assert ticket.waiter is not None
            if not ticket.waiter.done():  # a cancelled waiter is done
                if (left_s := self.left_s(turn)) > SOON_S:
                    self._timer = asyncio.get_running_loop().call_later(left_s, self._start_due)
                    return
                ticket.waiter.set_result(None)
            heapq.heappop(self._queue)

    def _check_in_flight(self) -> None:
        limit = self.limits.requests_in_flight
        if limit is None or len(self._in_flight) + len(self._with_engine) < limit:
            return
        self._forget_ended()
        if len(self._in_flight) + len(self._with_engine) >= limit:
            raise OverQuota(
                "requests_in_flight",
                f"this API key's tenant has {limit} samples in flight, and may have no more; try again later",
                retry_after_s=1,
            )

    def _forget_ended(self) -> None:
        self._with_engine = {request_id for request_id in self._with_engine if self._is_pending(request_id)}
