"""What the status page and `skyrl status` show: a tenant's runs, samplers, agent sessions, checkpoints and usage,
and the server.

Everything comes from the database and from this process's configuration, so that any API process gives the same answer.
Nothing in it is of another tenant. Times are in seconds since the epoch.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, fields
from typing import Any

from skyrl import __version__
from skyrl.api.access import Caller
from skyrl.api.request_status.commands import RunStatus
from skyrl.api.request_status.finding import BaseModelState, Stuck, stuck, stuck_of_all
from skyrl.api.run_health.health import Health
from skyrl.api.services import Services
from skyrl.api.ui.agent_sessions import (
    MAX_TOKENS,
    MAX_TURNS,
    session_facts,
    session_line,
    shown_tokens,
    shown_turns,
)
from skyrl.base.types.agents import AgentSession
from skyrl.base.wire.errors import NotFound
from skyrl.storage.db import runs as rows
from skyrl.storage.db.agents import Counts
from skyrl.storage.db.checkpoints import Checkpoint, Seen
from skyrl.storage.db.database import Connection
from skyrl.storage.db.run_steps import CurvePoint, Step, history
from skyrl.storage.db.runs import Pending, Run, SamplerGroup
from skyrl.storage.db.usage_report import UsageLine, last_days, report

MAX_RUNS = 100
MAX_CURVES = 20
"""Runs with the newest requests that have curves and a health in the state of a tenant."""
MAX_SAMPLER_GROUPS = 50
MAX_PENDING = 200
"""Kinds and models whose requests that have not ended are counted."""
MAX_CHECKPOINTS = 100
MAX_AGENT_SESSIONS = 100
MAX_NAMES = 200
"""Runs beside the newest whose names are looked up for checkpoints and usage; others are shown with their ids."""
USAGE_DAYS, MAX_USAGE = 7, 1_000
"""Days of usage in the state of a tenant and of a run, and the most lines in that of a tenant: the newest. A tenant may
have thousands of runs in a week."""
MAX_DAYS = 366
USAGE_COLUMNS = [field.name for field in fields(UsageLine) if field.name != "tenant"]


class Overview:
    """One tenant's view."""

    def __init__(self, services: Services, caller: Caller) -> None:
        self._services = services
        self._tenant = caller.tenant
        self._scopes = caller.scopes

    async def state(self) -> dict[str, Any]:
        """The tenant's newest runs, samplers, agent sessions and checkpoints, and its usage of the last days."""
        several = len(self._services.served) > 1

        def read(connection: Connection) -> _State:
            runs = rows.runs_of(connection, self._tenant, MAX_RUNS)
            newest = {run.id: run.steps for run in runs[:MAX_CURVES]}
            return _State(
                runs,
                self._services.curves.of(connection, newest),
                self._services.healths.of(connection, newest),
                rows.open_samplers(connection, self._tenant, MAX_SAMPLER_GROUPS),
                rows.pending_of(connection, self._tenant, MAX_PENDING, by_base_model=several),
                report(connection, *last_days(USAGE_DAYS), tenant=self._tenant)[-MAX_USAGE:],
            )

        found = await self._services.database.read_async(read)
        saved, _ = await self._services.checkpoints.page(self._tenant, MAX_CHECKPOINTS, 0, Seen())
        agents, _ = await self._services.agent_sessions.page(self._tenant, MAX_AGENT_SESSIONS, 0)
        server = await self.server()
        names = await self._names(found, saved)
        statuses = [(run, self._services.statuses.of_run(run)) for run in found.runs]
        stuck = await self._stuck(statuses, found.pending)
        return {
            "server": server,
            "stuck": [_stuck(one) for one in stuck if not one.is_slow],
            "slow": [_stuck(one) for one in stuck if one.is_slow],
            "pending": _pending(found.pending),
            "runs": [_run(*each) | found.of_steps(each[0].id) for each in statuses],
            "samplers": [asdict(group) | {"name": names.get(group.run or "")} for group in found.samplers],
            "agents": [session_line(*each) for each in agents],
            "checkpoints": [_checkpoint(one) | {"name": names.get(one.path.model_id)} for one in saved],
            "usage": [_usage(line) | {"name": names.get(line.run)} for line in found.usage],
        }

    async def _names(self, found: _State, saved: list[Checkpoint]) -> dict[str, str]:
        """By id, the names of the runs that the state names."""
        ids = {run.id: run.name for run in found.runs}
        others = [group.run for group in found.samplers] + [one.path.model_id for one in saved]
        others += [line.run for line in reversed(found.usage)]
        missing = [run for run in dict.fromkeys(others) if run and run not in ids][:MAX_NAMES]
        looked_up = await self._services.database.read_async(lambda c: rows.names_of(c, self._tenant, missing))
        return {run: name for run, name in ids.items() if name} | looked_up

    async def _stuck(self, runs: list[tuple[Run, RunStatus]], pending: list[Pending]) -> list[Stuck]:
        served, readiness, now = self._services.served, self._services.readiness, time.time()
        if len(served) == 1:
            _, reasons = await readiness.now()
            return stuck(reasons, runs, pending, served[0].watch.activity, now)
        reasons = await readiness.by_model()
        models = [BaseModelState(model.name, reasons[model.name][1], model.watch.activity) for model in served]
        found = stuck_of_all(models, served.number_of, runs, pending, now)
        return [*found, *map(Stuck, readiness.of_server())]

    async def run(self, model_id: str, after: int) -> dict[str, Any]:
        """One run with its checkpoints, and the steps of its history after the step `after`. Raises NotFound."""

        def read(connection: Connection) -> tuple[Run, Health, list[Step], list[UsageLine]] | None:
            run = rows.run_of(connection, model_id, self._tenant)
            if run is None:
                return None
            usage = report(connection, *last_days(USAGE_DAYS), tenant=self._tenant, run=model_id)
            health = self._services.healths.of(connection, {run.id: run.steps})[run.id]
            return run, health, history(connection, model_id, after), usage

        found = await self._services.database.read_async(read)
        if found is None:
            raise NotFound(f"no run {model_id!r}", field="run_id")
        run, health, steps, usage = found
        saved = await self._services.checkpoints.of_model(model_id, self._tenant, Seen(), MAX_CHECKPOINTS)
        return _run(run, self._services.statuses.of_run(run)) | {
            "server": await self.server(),
            "health": health.shown(),
            "history": [_step(step) for step in steps],
            "checkpoints": [_checkpoint(one) | {"name": run.name} for one in saved[::-1]],
            "usage": [_usage(line) | {"name": run.name} for line in usage],
        }

    async def agent_session(self, session_id: str, after: int) -> dict[str, Any]:
        """An agent session, and the turns after the row `after`: as many as fit one answer. `last` is the row of the
        last one, and `more` says whether there are others. Raises NotFound."""
        session = await self._agent_session(session_id)
        counts = (await self._services.agent_sessions.counts([session_id])).get(session_id, Counts())
        found = await self._services.agent_turns.page(session_id, after, MAX_TURNS)
        shown = shown_turns([turn for _, turn in found])
        return {
            "server": await self.server(),
            "session": session_facts(session, counts),
            "turns": shown,
            "last": found[len(shown) - 1][0] if shown else after,
            "more": len(shown) < len(found) or len(found) == MAX_TURNS,
        }

    async def agent_tokens(self, session_id: str, turn_id: str) -> dict[str, Any]:
        """The tokens that a turn has sampled. Raises NotFound."""
        session = await self._agent_session(session_id)
        turn = await self._services.agent_turns.find(session_id, turn_id)
        if turn is None:
            raise NotFound("no such turn", field="agent_turn")
        number = self._services.served.number_of(session.base_model)
        ids = turn.sampled[:MAX_TOKENS].tolist()
        return shown_tokens(turn, await self._services.agent_continuations.texts(number, ids))

    async def _agent_session(self, session_id: str) -> AgentSession:
        session = await self._services.agent_sessions.find(session_id)
        if session is None or session.tenant != self._tenant:
            raise NotFound("no such agent session", field="agent_session")
        return session

    async def usage(self, days: int, run: str | None) -> list[dict[str, Any]]:
        """The tenant's tokens of the last `days` days, of one run or of all."""
        lines = await self._services.database.read_async(
            lambda c: report(c, *last_days(days), tenant=self._tenant, run=run)
        )
        return [_usage(line) for line in lines]

    async def server(self) -> dict[str, Any]:
        """As `/readyz` has it. `scopes` are those of the caller's key."""
        ready, reasons = await self._services.readiness.now()
        shown = {"version": __version__, "ready": ready, "reasons": reasons, "scopes": sorted(self._scopes)}
        if len(self._services.served) > 1:
            shown["base_models"] = await self._base_models()
        return shown

    async def _base_models(self) -> list[dict[str, Any]]:
        """What each base model is for, whether it is ready, and why not."""
        found = await self._services.readiness.by_model()
        return [
            {
                "name": model.name,
                "uses": model.config.uses,
                "ready": found[model.name][0],
                "reasons": found[model.name][1],
            }
            for model in self._services.served
        ]


@dataclass(frozen=True, slots=True)
class _State:
    """What the database has for the state of a tenant."""

    runs: list[Run]
    curves: dict[str, list[CurvePoint]]
    healths: dict[str, Health]
    samplers: list[SamplerGroup]
    pending: list[Pending]
    usage: list[UsageLine]

    def of_steps(self, run: str) -> dict[str, Any]:
        """What is shown of a run's steps; `health` is None for a run that is not among the newest."""
        health = self.healths.get(run)
        return {
            "curve": _curve(self.curves.get(run, [])),
            "health": None if health is None else health.in_short(),
        }


def _run(run: Run, status: RunStatus) -> dict[str, Any]:
    return {
        "id": run.id,
        "session_id": run.session_id,
        "name": run.name,
        "base_model": run.base_model,
        "lora_rank": run.lora_rank,
        "living": run.is_living,
        "state": status.state,
        "sentence": status.sentence,
        "steps": run.steps,
        "last_step": None if run.last is None else _step(run.last),
        "samples_in_flight": run.samples_in_flight,
        "created_at": run.created_at,
        "last_request_at": run.last_request_at,
    }


def _stuck(one: Stuck) -> dict[str, Any]:
    return {"sentence": one.sentence, "since": one.since, "run": one.run}


def _pending(pending: list[Pending]) -> dict[str, Any]:
    """How many requests have not ended, and the kind of the oldest and when it was accepted."""
    oldest = min(pending, key=lambda one: one.since, default=None)
    return {
        "number": sum(one.number for one in pending),
        "oldest_kind": None if oldest is None else oldest.kind,
        "oldest_since": None if oldest is None else oldest.since,
    }


def _curve(points: list[CurvePoint]) -> dict[str, list[float | None]]:
    """Columns of the points, with four digits: a small curve shows no more."""
    return {
        "step": [point.step for point in points],
        "loss": [_short(point.loss) for point in points],
        "gap": [_short(point.gap) for point in points],
    }


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


def _step(step: Step) -> dict[str, Any]:
    """A step, with its training tokens per second of the trainer's time; None for a step without passes."""
    rate = step.tokens / step.busy_s if step.busy_s > 0 and step.tokens else None
    return asdict(step) | {"tokens_per_second": rate}


def _checkpoint(checkpoint: Checkpoint) -> dict[str, Any]:
    return {
        "path": str(checkpoint.path),
        "kind": checkpoint.path.kind,
        "run": checkpoint.path.model_id,
        "size_bytes": checkpoint.size_bytes,
        "public": checkpoint.public,
        "created_at": checkpoint.created_at,
        "expires_at": checkpoint.expires_at,
    }


def _usage(line: UsageLine) -> dict[str, Any]:
    values = asdict(line)
    del values["tenant"]
    return values
