"""Usage by the hour, as the SDK's AdminClient reads it. Amounts only: this server has no prices."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import Any

from starlette.responses import Response

from skyrl.base.wire.errors import RequestError
from skyrl.server.api.call import Call
from skyrl.server.api.reply import reply, strings, timestamp
from skyrl.server.api.routes import API, Routes
from skyrl.server.api.services import Services
from skyrl.server.api.tokens import user_urn
from skyrl.storage.db.usage import GIGABYTE, HOUR_S, UsageKind

MAX_WINDOW = timedelta(days=14)


def _hour(field: str, value: datetime | None) -> datetime:
    """`value` in UTC; a time without an offset counts as UTC. Raises RequestError unless it is a full hour."""
    if value is None:
        raise RequestError("is missing", field=field)
    try:
        value = value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)
    except OverflowError as error:
        raise RequestError("is outside the years 1 to 9999 in UTC", field=field) from error
    if value.minute or value.second or value.microsecond:
        raise RequestError(f"must be a full hour in UTC, got {value.isoformat()}", field=field)
    return value


def _window(starting_on: datetime | None, ending_before: datetime | None) -> tuple[datetime, datetime]:
    start, end = _hour("starting_on", starting_on), _hour("ending_before", ending_before)
    if start.timestamp() > time.time():
        raise RequestError("must not be in the future", field="starting_on")
    if end <= start:
        raise RequestError("must be after starting_on", field="ending_before")
    if end - start > MAX_WINDOW:
        raise RequestError(f"must be at most {MAX_WINDOW.days} days after starting_on", field="ending_before")
    return start, end


def _event_info(kind: str, amount: float) -> dict[str, Any]:
    if kind == UsageKind.STORAGE:
        return {"type": "storage", "gigabyte_hours": amount}
    if kind == UsageKind.CHECKPOINT:
        return {"type": "checkpoint", "count": round(amount)}
    if kind in (UsageKind.PREFILL, UsageKind.PREFILL_CACHED):
        cached = kind == UsageKind.PREFILL_CACHED
        return {"type": "sampling_prefill", "cached": cached, "token_count": round(amount)}
    return {"type": kind, "token_count": round(amount)}


def router(services: Services) -> Routes:
    routes = Routes("billing", f"{API}/billing/usage")

    @routes.get("/events", scope="admin")
    async def events(
        call: Call, starting_on: datetime | None = None, ending_before: datetime | None = None
    ) -> Response:
        """Amounts of each full hour, kind, base model and session."""
        tenant = call.tenant
        amounts, sessions = await services.usage.between(tenant, *_window(starting_on, ending_before))
        data = [
            {
                "bucket_start": timestamp(usage.bucket),
                "bucket_end": timestamp(usage.bucket + HOUR_S),
                "base_model": usage.base_model,
                "user_id": user_urn(tenant),
                "session_id": usage.session_id or None,
                "project_id": sessions[usage.session_id].project_id if usage.session_id in sessions else None,
                "event_info": _event_info(usage.kind, usage.amount),
            }
            for usage in amounts
        ]
        named = {
            session_id: {"user_metadata": strings(session.user_metadata)} for session_id, session in sessions.items()
        }
        return reply({"data": data, "sessions": named})

    @routes.get("/checkpoints/current", scope="admin")
    async def current_checkpoints(call: Call, project_id: str | None = None) -> Response:
        """Number and size of the live checkpoints, by project."""
        tenant = call.tenant
        projects = await services.usage.stored(tenant, project_id)
        return reply(
            {
                "data": [
                    {
                        "project_id": project.project_id,
                        "org_user_urn": user_urn(tenant),
                        "checkpoint_count": project.checkpoints,
                        "size_bytes": project.size_bytes,
                        "size_gigabytes": project.size_bytes / GIGABYTE,
                    }
                    for project in projects
                ]
            }
        )

    return routes
