"""Finds where a request or a run of a tenant stands: for the answer to a long poll that has no result yet, and for the
status page."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from skyrl.base.types.activity import EngineActivity
from skyrl.base.types.requests import Kind
from skyrl.sampling.quotas import Quotas
from skyrl.sampling.service import SampleService
from skyrl.server.request_status.commands import of_command
from skyrl.server.request_status.runs import RunStatus, of_run
from skyrl.server.request_status.samples import of_colocated, of_elsewhere, of_forwarded
from skyrl.server.request_status.status import RequestStatus, active, paused, paused_by_quota
from skyrl.storage.db import commands as rows
from skyrl.storage.db.database import Database
from skyrl.storage.db.runs import Run


class EngineView(Protocol):
    """What an API process knows of the engine of one base model."""

    @property
    def activity(self) -> EngineActivity: ...

    def training_trouble(self) -> str | None:
        """Why the engine cannot train now; None if it can."""
        ...


class StatusFinder:
    """`engine_of` returns the view of the engine that trains the base model of this name."""

    def __init__(
        self,
        database: Database,
        sampling: SampleService,
        quotas: Quotas,
        *,
        engine_of: Callable[[str], EngineView],
        session_timeout_s: float,
    ) -> None:
        self._database = database
        self._sampling = sampling
        self._quotas = quotas
        self._engine_of = engine_of
        self._session_timeout_s = session_timeout_s

    async def of_request(self, request_id: str, kind: Kind, tenant: str) -> RequestStatus:
        """Where a pending request of the tenant stands."""
        lane = self._sampling.lanes.with_sample(request_id)
        if self._quotas.in_use:
            pause = await self._quotas.pause_of(request_id, tenant, started=lane is not None)
            if pause is not None:
                return paused_by_quota(pause)
        if lane is not None and (progress := lane.forwarded.progress(request_id)) is not None:
            return of_forwarded(progress, lane.forwarded.adapters_in_flight(), lane.places, lane.why_away())
        base_model = await self._database.read_async(lambda c: rows.base_model_of(c, request_id))
        engine = self._engine_of(base_model or "")
        if kind is Kind.EXTERNAL:
            return of_elsewhere(engine.activity, time.time())
        if (trouble := _of_trouble(engine)) is not None:
            return trouble
        if kind is Kind.SAMPLE:
            return of_colocated(engine.activity)
        command = await self._database.read_async(lambda c: rows.pending_command(c, request_id))
        return active("it has just ended") if command is None else of_command(command, engine.activity, time.time())

    def of_run(self, run: Run) -> RunStatus:
        """Where a run stands."""
        engine = self._engine_of(run.base_model)
        return of_run(run, engine.activity, _of_trouble(engine), time.time(), self._session_timeout_s)


def _of_trouble(engine: EngineView) -> RequestStatus | None:
    """What all training commands wait for while the engine cannot train."""
    if (trouble := engine.training_trouble()) is None:
        return None
    if (recovery := engine.activity.recovery) is not None:
        return paused(
            f"the trainer has restarted, and has repeated {recovery.repeated} of {recovery.commands} commands"
        )
    return paused(f"the trainer cannot run commands now: {trouble}")
