"""The quotas of all tenants, as one API process keeps them.

Limits are the configuration's, with tenants' exceptions from the database, read again every few seconds. Samples and
tokens are counted in memory, by each API process for itself; models and bytes in the database.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from skyrl.db import quotas as rows
from skyrl.db.database import Connection, Database
from skyrl.quotas.account import SOON_S, Account, Ticket
from skyrl.quotas.limits import Bounds, QuotaLimits, bound_sentence, sampling_sessions_sentence, stored_sentence
from skyrl.wire.errors import OverQuota

Check = Callable[[Connection], None]
"""Belongs into the transaction of what it checks. Raises OverQuota."""


class Charge:
    """What a training command was charged. It is given back unless the command is `kept`."""

    def __init__(self, not_before: float | None) -> None:
        self.not_before = not_before
        self.kept = False


class Quotas:
    """`any` is false while no tenant has any quota: then there is nothing to ask. `is_pending` tells of a request in
    this process whether it has not ended."""

    def __init__(
        self,
        database: Database,
        defaults: QuotaLimits,
        bounds: Bounds,
        is_pending: Callable[[str], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._database = database
        self._defaults = defaults
        self._is_pending = is_pending
        self._clock = clock
        self._bounds = bounds
        self._exceptions: dict[str, QuotaLimits] = {}
        self._accounts: dict[str, Account] = {}
        self.waiting: dict[str, Ticket] = {}
        """Samples in this process whose turn has not come, by request id."""
        self.any = defaults != QuotaLimits()
        self.refused: Counter[str] = Counter()
        self._paused = 0

    async def open(self) -> None:
        """Read the exceptions, and what is paused from before: a restart gives nobody new tokens for it."""
        await self.refresh()
        if self.any:
            for tenant, until in (await self._database.read_async(lambda c: rows.paused(c, time.time()))).items():
                if (account := self._account(tenant)) is not None:
                    account.owe(until)

    async def refresh(self) -> None:
        """Read the exceptions again. When the database cannot be read, what was read last holds."""
        found = await self._database.read_async(rows.exceptions)
        self._exceptions = {tenant: self._defaults.but(numbers) for tenant, numbers in found.items()}
        self.any = any(limits != QuotaLimits() for limits in (self._defaults, *self._exceptions.values()))
        for tenant, account in list(self._accounts.items()):
            account.apply(self.of(tenant))
            if account.idle:
                del self._accounts[tenant]

    def of(self, tenant: str) -> QuotaLimits:
        return self._exceptions.get(tenant, self._defaults)

    def _account(self, tenant: str) -> Account | None:
        """None where there is nothing to count here."""
        account = self._accounts.get(tenant)
        limits = self.of(tenant)
        if account is None and (limits.requests_in_flight is not None or limits.tokens_per_minute is not None):
            account = self._accounts[tenant] = Account(limits, self._is_pending, self._clock, self.waiting)
        return account

    def admit(self, tenant: str, request_id: str, tokens: int) -> Ticket | None:
        """Admit a sample that may use so many tokens; None where there is no quota. Raises OverQuota."""
        account = self._account(tenant)
        if account is None:
            return None
        ticket = account.admit(request_id, tokens)
        self._paused += ticket.not_before is not None
        return ticket

    def adopt(self, tenant: str, request_id: str, not_before: float | None) -> Ticket | None:
        """A sample that was admitted before."""
        account = self._account(tenant)
        return None if account is None else account.adopt(request_id, not_before)

    def counts(self) -> dict[str, Any]:
        """Of this process: requests refused, by quota; requests that had to wait for tokens, and samples that do; and
        how many tenants have exceptions, as it knows."""
        return {
            "refused": dict(self.refused),
            "paused": self._paused,
            "waiting": len(self.waiting),
            "exceptions": len(self._exceptions),
        }

    def counts_tokens(self, tenant: str) -> bool:
        return self.any and self.of(tenant).tokens_per_minute is not None

    @contextmanager
    def charged(self, tenant: str, tokens: int) -> Iterator[Charge]:
        """A command that trains on so many tokens. It is never refused: a number that is never sent again would hold up
        its model for ever."""
        account = self._account(tenant) if tokens else None
        if account is None:
            yield Charge(None)
            return
        ticket = account.charge("", tokens)
        charge = Charge(ticket.not_before)
        try:
            yield charge
        finally:
            if not charge.kept:
                ticket.end()
            elif charge.not_before is not None:
                self._paused += 1

    async def pause_of(self, request_id: str, tenant: str, *, started: bool) -> str | None:
        """Why a pending request of the tenant has not begun, if that is its quota; `started` says that it has begun in
        this process, unless it waits for its turn."""
        if not self.counts_tokens(tenant):
            return None
        if (ticket := self.waiting.get(request_id)) is not None:
            left_s = ticket.left_s
        elif started:
            return None
        else:
            until = await self._database.read_async(lambda c: rows.not_before(c, request_id))
            left_s = 0.0 if until is None else until - time.time()
        if left_s <= SOON_S:
            return None
        rate = self.of(tenant).tokens_per_minute
        return f"the quota of {rate} tokens per minute is used up; this request starts in about {left_s:.0f} s"

    def models(self, tenant: str) -> Check:
        """For the transaction that adds a model."""
        quota, bound = self.of(tenant).models, self._bounds.models

        def check(connection: Connection) -> None:
            living = rows.living_models(connection, tenant)
            if quota is not None and living >= quota:
                raise OverQuota(
                    "models",
                    f"models: this API key's tenant may have {quota} in training, and has {living}: unload one, or "
                    "finish a session that is done",
                )
            if living >= bound:
                held = "models in training"
                raise OverQuota("models", bound_sentence("models", bound, living, held, "unload one"))

        return check

    def sessions(self, tenant: str) -> Check:
        """For the transaction that adds a session."""
        bound = self._bounds.sessions

        def check(connection: Connection) -> None:
            if (active := rows.active_sessions(connection, tenant)) >= bound:
                done = "finish those that are done"
                raise OverQuota("sessions", bound_sentence("sessions", bound, active, "active sessions", done))

        return check

    def sampling_sessions(self, tenant: str) -> Check:
        """For the transaction that adds a sampling session."""
        bound = self._bounds.sampling_sessions

        def check(connection: Connection) -> None:
            if (living := rows.living_samplers(connection, tenant)) >= bound:
                raise OverQuota("sampling_sessions", sampling_sessions_sentence(living, bound))

        return check

    def stored_bytes(self, tenant: str, size: int) -> Check | None:
        """For the transaction that adds checkpoints of that size."""
        limit = self.of(tenant).stored_bytes if self.any else None
        if limit is None:
            return None

        def check(connection: Connection) -> None:
            if (stored := rows.stored_bytes(connection, tenant)) + size > limit:
                raise OverQuota("stored_bytes", stored_sentence(stored, limit))

        return check

    async def check(self, check: Check | None) -> None:
        """Ahead of work that would be in vain."""
        if check is not None:
            await self._database.read_async(check)
