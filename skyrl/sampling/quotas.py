"""The quotas of all tenants in one API process.

The limits come from the configuration, and from the exceptions in the database, which are read again every few seconds.
Each API process counts samples and tokens for itself, in memory. Models and bytes are counted in the database.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from skyrl.base.wire.errors import OverQuota
from skyrl.sampling.quota_account import (
    SAMPLING_SESSIONS,
    SOON_S,
    Account,
    Bounds,
    QuotaLimits,
    Ticket,
    bound_sentence,
    stored_sentence,
)
from skyrl.storage.db import quotas as rows
from skyrl.storage.db.database import Connection, Database
from skyrl.storage.shares import SavesDisk

Check = Callable[[Connection], None]
"""Raises OverQuota if the tenant may not add an object. Runs in the transaction that adds the object."""


class Charge:
    """The tokens charged for a training command. They are given back unless the command was recorded (`kept`)."""

    def __init__(self, not_before: float | None) -> None:
        self.not_before = not_before
        self.kept = False


class Quotas:
    """`in_use` is false while no tenant has a quota; then samples are not counted. `is_pending` returns whether a
    request in this process has not ended. `saves`: the disk of the checkpoints, if there is one."""

    def __init__(
        self,
        database: Database,
        defaults: QuotaLimits,
        bounds: Bounds,
        is_pending: Callable[[str], bool],
        saves: SavesDisk | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._database = database
        self._saves = saves
        self._defaults = defaults
        self._is_pending = is_pending
        self._clock = clock
        self._bounds = bounds
        self._exceptions: dict[str, QuotaLimits] = {}
        self._accounts: dict[str, Account] = {}
        self.waiting: dict[str, Ticket] = {}
        """Samples in this process that wait for tokens, by request id."""
        self.in_use = defaults != QuotaLimits()
        self.refused: Counter[str] = Counter()
        self._paused = 0

    async def open(self) -> None:
        """Read the exceptions, and the paused requests from before this start: a restart gives no tenant new tokens."""
        await self.refresh()
        if self.in_use:
            for tenant, until in (await self._database.read_async(lambda c: rows.paused(c, time.time()))).items():
                if (account := self._account(tenant)) is not None:
                    account.owe(until)

    async def refresh(self) -> None:
        """Read the exceptions again. If the database cannot be read, the last exceptions stay."""
        found = await self._database.read_async(rows.exceptions)
        self._exceptions = {tenant: self._defaults.with_exceptions(numbers) for tenant, numbers in found.items()}
        self.in_use = any(limits != QuotaLimits() for limits in (self._defaults, *self._exceptions.values()))
        for tenant, account in list(self._accounts.items()):
            account.apply(self.of(tenant))
            if account.idle:
                del self._accounts[tenant]

    def of(self, tenant: str) -> QuotaLimits:
        return self._exceptions.get(tenant, self._defaults)

    def _account(self, tenant: str) -> Account | None:
        """None if the tenant has no quota that is counted in memory."""
        account = self._accounts.get(tenant)
        limits = self.of(tenant)
        if account is None and (limits.requests_in_flight is not None or limits.tokens_per_minute is not None):
            account = self._accounts[tenant] = Account(limits, self._is_pending, self._clock, self.waiting)
        return account

    def admit(self, tenant: str, request_id: str, tokens: int) -> Ticket | None:
        """Admit a sample that uses at most `tokens`; None if there is no quota. Raises OverQuota."""
        account = self._account(tenant)
        if account is None:
            return None
        ticket = account.admit(request_id, tokens)
        self._paused += ticket.not_before is not None
        return ticket

    def adopt(self, tenant: str, request_id: str, not_before: float | None) -> Ticket | None:
        """A sample that another process, or the predecessor of this one, has admitted."""
        account = self._account(tenant)
        return None if account is None else account.adopt(request_id, not_before)

    def counts(self) -> dict[str, Any]:
        """Counts of this process: requests refused, by quota; requests that had to wait for tokens; samples that wait
        now; tenants with exceptions."""
        return {
            "refused": dict(self.refused),
            "paused": self._paused,
            "waiting": len(self.waiting),
            "exceptions": len(self._exceptions),
        }

    def counts_tokens(self, tenant: str) -> bool:
        return self.in_use and self.of(tenant).tokens_per_minute is not None

    @contextmanager
    def charged(self, tenant: str, tokens: int) -> Iterator[Charge]:
        """Charge a training command. It is never refused: the SDK would not send its number again, and the later
        commands of the model would wait for ever."""
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
        """A sentence if a pending request of the tenant waits for tokens, else None. `started` says whether this
        process forwards the request, or lets it wait for tokens."""
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
        """The check before a model is added."""
        quota, bound = self.of(tenant).models, self._bounds.models

        def check(connection: Connection) -> None:
            living = rows.living_models(connection, tenant)
            if quota is not None and living >= quota:
                raise OverQuota(
                    "models",
                    f"models: this API key's tenant may have {quota} in training, and has {living}: unload one, or "
                    "finish a session that is done",
                )
            _check_bound("models", living, bound, "models in training", "unload one")

        return check

    def sessions(self, tenant: str) -> Check:
        """The check before a session is added."""
        bound, remedy = self._bounds.sessions, "finish those that are done"
        return lambda c: _check_bound("sessions", rows.active_sessions(c, tenant), bound, "active sessions", remedy)

    def sampling_sessions(self, tenant: str) -> Check:
        """The check before a sampling session is added."""
        bound, objects = self._bounds.sampling_sessions, SAMPLING_SESSIONS
        return lambda c: _check_bound("sampling sessions", rows.living_samplers(c, tenant), bound, *objects)

    def stored_bytes(self, tenant: str, size: int) -> Check | None:
        """The check before checkpoints of `size` bytes are added; None if nothing bounds the tenant's bytes. After an
        early run (`check`) it is cheap in the transaction."""
        limit = self.of(tenant).stored_bytes if self.in_use else None
        if limit is None and self._saves is None:
            return None

        of_tenant = rows.StoredBytes(tenant)

        def check(connection: Connection) -> None:
            if limit is not None and (stored := of_tenant.now(connection)) + size > limit:
                raise OverQuota("stored_bytes", stored_sentence(stored, limit))
            if (sentence := rows.over_disk_share(connection, of_tenant, self._saves)) is not None:
                raise OverQuota("stored_bytes", sentence)

        return check

    async def check(self, check: Check | None) -> None:
        """Run a check early, before work that it would make useless."""
        if check is not None:
            await self._database.read_async(check)


def _check_bound(kind: str, count: int, bound: int, objects: str, remedy: str) -> None:
    """Raises OverQuota if a tenant has reached one of `Bounds`; see `bound_sentence`."""
    if count >= bound:
        raise OverQuota(kind.replace(" ", "_"), bound_sentence(kind, bound, count, objects, remedy))
