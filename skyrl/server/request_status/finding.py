"""Finds where a request or a run of a tenant stands: for the answer to a long poll that has no result yet, and for the
status page."""

from __future__ import annotations

import time
from collections.abc import Callable

from skyrl.base.types.activity import EngineActivity
from skyrl.base.types.kinds import Kind
from skyrl.server.quotas.tenants import Quotas
from skyrl.server.request_status.commands import of_command
from skyrl.server.request_status.runs import RunStatus, of_run
from skyrl.server.request_status.samples import of_colocated, of_elsewhere, of_forwarded
from skyrl.server.request_status.status import RequestStatus, active, paused, paused_by_quota
from skyrl.server.sampling.service import SampleService
from skyrl.storage.db import commands as rows
from skyrl.storage.db.database import Database
from skyrl.storage.db.runs import Run


class StatusFinder:
    """`activity` returns what the engine told last, and `trouble` why the engine cannot train now, or None. `places` is
    how many adapters the inference servers run at a time; None if that is unknown. `away` returns why no inference
    server runs, if that is known."""

    def __init__(
        self,
        database: Database,
        sampling: SampleService,
        quotas: Quotas,
        *,
        activity: Callable[[], EngineActivity],
        trouble: Callable[[], str | None],
        places: int | None,
        session_timeout_s: float,
        away: Callable[[], str] = lambda: "",
    ) -> None:
        self._database = database
        self._sampling = sampling
        self._quotas = quotas
        self._activity = activity
        self._trouble = trouble
        self.places = places
        self._session_timeout_s = session_timeout_s
        self._away = away

    async def of_request(self, request_id: str, kind: Kind, tenant: str) -> RequestStatus:
        """Where a pending request of the tenant stands."""
        if self._quotas.in_use:
            started = self._sampling.forwards(request_id)
            if (pause := await self._quotas.pause_of(request_id, tenant, started=started)) is not None:
                return paused_by_quota(pause)
        if kind is Kind.EXTERNAL:
            return self._of_sample(request_id)
        if (trouble := self._of_trouble()) is not None:
            return trouble
        if kind is Kind.SAMPLE:
            return of_colocated(self._activity())
        command = await self._database.read_async(lambda c: rows.pending_command(c, request_id))
        return active("it has just ended") if command is None else of_command(command, self._activity(), time.time())

    def of_run(self, run: Run) -> RunStatus:
        """Where a run stands."""
        return of_run(run, self._activity(), self._of_trouble(), time.time(), self._session_timeout_s)

    def _of_sample(self, request_id: str) -> RequestStatus:
        progress = self._sampling.progress(request_id)
        if progress is None:
            return of_elsewhere(self._activity(), time.time())
        return of_forwarded(progress, self._sampling.adapters_in_flight(), self.places, self._away())

    def _of_trouble(self) -> RequestStatus | None:
        """What all training commands wait for while the engine cannot train."""
        if (trouble := self._trouble()) is None:
            return None
        if (recovery := self._activity().recovery) is not None:
            return paused(
                f"the trainer has restarted, and has repeated {recovery.repeated} of {recovery.commands} commands"
            )
        return paused(f"the trainer cannot run commands now: {trouble}")
