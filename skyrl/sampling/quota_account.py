"""One tenant's limits, and its account in an API process: samples in flight, tokens, and requests that wait for tokens.

The tokens are in a bucket that refuses no request: a request that takes more tokens than there are gets a later turn.
Knows numbers, turns and the sentences of refusals; does not know the content of a request.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

from skyrl.base.config.server import ServerConfig
from skyrl.base.wire.errors import OverQuota

UNLIMITED = -1
"""In a tenant's exceptions: no quota, whatever the configuration says. None means the quota of the configuration."""


@dataclass(frozen=True, slots=True)
class QuotaLimits:
    """None: no quota. `tokens_per_minute` is a rate; the others bound what a tenant has at one time. Stored bytes are
    the bytes of checkpoints and of weights saved for sampling without a name."""

    requests_in_flight: int | None = None
    tokens_per_minute: int | None = None
    models: int | None = None
    stored_bytes: int | None = None

    @classmethod
    def of(cls, config: ServerConfig) -> QuotaLimits:
        """The quotas of all tenants without exceptions."""
        return cls(*(getattr(config, f"quota_{name}") for name in NAMES))

    def with_exceptions(self, exceptions: Sequence[int | None]) -> QuotaLimits:
        """The quotas of a tenant with these exceptions, in the order of NAMES."""
        defaults = (getattr(self, name) for name in NAMES)
        return QuotaLimits(*(_override(*pair) for pair in zip(defaults, exceptions, strict=True)))


@dataclass(frozen=True, slots=True)
class Bounds:
    """Upper bounds for every tenant, whatever its quotas are: each object costs memory and rows of the database."""

    sessions: int = 10_000
    sampling_sessions: int = 100_000
    models: int = 1_000

    @classmethod
    def of(cls, config: ServerConfig) -> Bounds:
        return cls(
            config.max_sessions_per_tenant,
            config.max_sampling_sessions_per_tenant,
            config.max_models_per_tenant,
        )


NAMES: tuple[str, ...] = tuple(field.name for field in fields(QuotaLimits))
LEAST = {"requests_in_flight": 1, "tokens_per_minute": 1, "models": 0, "stored_bytes": 0}
"""The smallest quotas. With 0 requests in flight or 0 tokens per minute, no request would ever start."""


def _override(default: int | None, exception: int | None) -> int | None:
    if exception is None:
        return default
    return None if exception == UNLIMITED else exception


def bound_sentence(kind: str, bound: int, count: int, objects: str, remedy: str) -> str:
    """Says that a tenant has reached one of `Bounds`, and names its configuration key. `kind` are the words of that
    key; `count` and `objects` say what the tenant has."""
    key = f"max_{kind.replace(' ', '_')}_per_tenant"
    return f"{key}: a tenant may have at most {bound}, and this API key's tenant has {count} {objects}: {remedy}"


SAMPLING_SESSIONS = "sampling sessions in active sessions", "finish a session that is done"
"""The objects and the remedy of `bound_sentence`."""


def sampling_sessions_sentence(living: int, bound: int) -> str:
    return bound_sentence("sampling sessions", bound, living, *SAMPLING_SESSIONS)


def stored_sentence(stored: int, limit: int) -> str:
    return (
        f"this API key's tenant has {stored} bytes of checkpoints and of weights saved for sampling, and may have "
        f"{limit}: delete checkpoints or give them a time to live, finish sessions that are done, or wait until "
        "weights that were saved without a name, and that nobody samples from, are deleted"
    )


class TokenBucket:
    """Tokens come in at a rate, and the bucket holds at most a minute's worth. If a request takes more tokens than
    there are, the level falls below zero, and the request starts when enough tokens have come in. Requests start in the
    order of arrival. A request for more than a minute's worth starts when the bucket is full; later requests wait for
    the rest.

    The turn of a request is an income: the total of tokens that must have come in since the bucket began. So all turns
    come earlier when tokens are given back, and move with the rate when it changes.
    """

    def __init__(self, per_minute: int, now: float) -> None:
        self._per_minute = per_minute
        self._level = float(per_minute)
        self._income = 0.0
        self._updated_at = now

    def take(self, tokens: float, now: float) -> float:
        """Take tokens for a request. Returns its turn."""
        missing = self._missing(tokens, now)
        self._level -= tokens
        return self._income + missing

    def wait_s(self, tokens: float, now: float) -> float:
        """Seconds that a request for `tokens` would wait."""
        return self._seconds(self._missing(tokens, now))

    def left_s(self, turn: float, now: float) -> float:
        """Seconds until a turn, if no tokens are given back."""
        self._advance(now)
        return self._seconds(max(0.0, turn - self._income))

    def give_back(self, tokens: float, now: float) -> None:
        """Give back tokens that were taken and not used; a negative number of tokens takes more."""
        self._advance(now)
        self._come_in(tokens)

    def owe(self, seconds: float, now: float) -> float:
        """Lower the level so that it takes `seconds` to reach zero, unless it is lower already. Returns the turn after
        that time."""
        self._advance(now)
        tokens = seconds * self._per_minute / 60
        self._level = min(self._level, -tokens)
        return self._income + tokens

    def change_rate(self, per_minute: int, now: float) -> None:
        self._advance(now)
        self._per_minute = per_minute
        self._level = min(self._level, per_minute)

    def full(self, now: float) -> bool:
        """Whether the bucket holds a minute's worth, as at first."""
        self._advance(now)
        return self._level >= self._per_minute

    def _missing(self, tokens: float, now: float) -> float:
        self._advance(now)
        excess = max(0.0, tokens - self._per_minute)
        return max(0.0, tokens - self._level - excess)

    def _seconds(self, tokens: float) -> float:
        return tokens * 60 / self._per_minute

    def _advance(self, now: float) -> None:
        if now > self._updated_at:
            self._come_in((now - self._updated_at) * self._per_minute / 60)
            self._updated_at = now

    def _come_in(self, tokens: float) -> None:
        self._income += tokens
        self._level = min(self._level + tokens, self._per_minute)


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
