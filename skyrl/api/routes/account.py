"""What a tenant has here: its API key, its audit log by day, and its usage by the hour.

A caller gets a token for its key, describes the key, and revokes it with itself. Usage is as the SDK's AdminClient
reads it. Amounts only: this server has no prices."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, date, datetime, timedelta
from datetime import time as clock
from typing import Any, Literal

from starlette.responses import Response

from skyrl.api.access import Caller, is_token, offered_key, user_urn
from skyrl.api.call import Call, reply, strings, timestamp
from skyrl.api.routing import API, Routes
from skyrl.api.services import Services
from skyrl.base.wire.errors import RequestError
from skyrl.storage.db.audit import AuditEvent
from skyrl.storage.db.keys import SCOPES
from skyrl.storage.db.usage import GIGABYTE, HOUR_S, UsageKind

_KEY_ID_BITS = 53
"""Every reader of JSON reads whole numbers of up to this many bits exactly."""
_UNLISTED = "This server keeps no list of keys: any key is accepted, and is a tenant of its own."


def _description(caller: Caller) -> dict[str, Any]:
    """A key's number, name and note."""
    key = caller.key
    if key is None:
        number = int(caller.tenant, 16) >> (128 - _KEY_ID_BITS)
        return {"key_id": number, "name": f"key of tenant {caller.tenant[:8]}", "note": _UNLISTED}
    scopes = ", ".join(scope for scope in SCOPES if scope in key.scopes)
    expiry = "does not expire" if key.expires_at is None else f"expires {timestamp(key.expires_at)}"
    return {"key_id": int(key.id, 16), "name": key.name or key.id, "note": f"Key {key.id}; scopes: {scopes}; {expiry}."}


def key_routes(services: Services) -> Routes:
    routes = Routes("auth", f"{API}/auth")

    @routes.post("/token", scope="any")
    async def token(call: Call) -> Response:
        """A token for the caller's key. A caller that sends a token gets that token back: asking does not prolong
        it."""
        caller, key_or_token = call.caller, offered_key(call.received)
        if is_token(key_or_token):
            return reply({"jwt": key_or_token})
        return reply({"jwt": services.tokens.issue(caller.tenant, caller.key.id if caller.key is not None else None)})

    @routes.get("/apikey/me", scope="any")
    async def own_key(call: Call) -> Response:
        caller = call.caller
        details = {
            "org_details": {"name": f"skyrl at {call.request.url.netloc}"},
            "user_details": {"email": f"tenant {caller.tenant[:8]}"},
        }
        return reply(_description(caller) | {"details": details})

    @routes.delete("/apikey/me", scope="any")
    async def delete_own_key(call: Call) -> Response:
        """Revoke the caller's key. The key, and every token made for it, is refused from now on."""
        caller = call.caller
        if caller.key is None:
            raise RequestError(
                "this server keeps no list of keys and accepts any key, so there is no key to delete",
                status=403,
            )
        await services.access.keys.revoke(caller.key.id)
        return reply({})

    return routes


EventType = Literal["all", "checkpoints", "projects", "teams", "organizations"]
"""Teams and organizations have no events: this server knows tenants only."""

DAY_S = 86_400


def audit_routes(services: Services) -> Routes:
    routes = Routes("audit")

    @routes.get("/audit", scope="admin")
    async def audit(call: Call, event_type: EventType = "all", day: date | None = None) -> Response:
        """The events of one day in UTC, oldest first. Without `day`: today."""
        tenant = call.tenant
        day = day or datetime.fromtimestamp(time.time(), UTC).date()
        start = datetime.combine(day, clock(), UTC)
        resource = None if event_type == "all" else event_type.removesuffix("s")
        async with services.search_turns.turn(tenant):
            events = await services.audit.between(tenant, start.timestamp(), start.timestamp() + DAY_S, resource)
            return await asyncio.to_thread(lambda: reply({"entries": [_entry(event) for event in events]}))

    return routes


def _entry(event: AuditEvent) -> dict[str, Any]:
    return {
        "timestamp": timestamp(event.at),
        "event": event.event,
        "event_details": event.details,
        "model_id": event.details.get("model_id"),
        "tinker_path": event.details.get("tinker_path"),
    }


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


def usage_routes(services: Services) -> Routes:
    routes = Routes("billing", f"{API}/billing/usage")

    @routes.get("/events", scope="admin")
    async def events(
        call: Call, starting_on: datetime | None = None, ending_before: datetime | None = None
    ) -> Response:
        """Amounts of each full hour, kind, base model and session."""
        tenant = call.tenant
        window = _window(starting_on, ending_before)
        async with services.search_turns.turn(tenant):
            amounts, sessions = await services.usage.between(tenant, *window)
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
