"""The audit log of a tenant, by day."""

from __future__ import annotations

import time
from datetime import UTC, date, datetime
from datetime import time as clock
from typing import Literal

from starlette.responses import Response

from skyrl.server.api.call import Call
from skyrl.server.api.reply import reply, timestamp
from skyrl.server.api.routes import Routes
from skyrl.server.api.services import Services

EventType = Literal["all", "checkpoints", "projects", "teams", "organizations"]
"""Teams and organizations have no events: this server knows tenants only."""

DAY_S = 86_400


def router(services: Services) -> Routes:
    routes = Routes("audit")

    @routes.get("/audit", scope="admin")
    async def audit(call: Call, event_type: EventType = "all", day: date | None = None) -> Response:
        """The events of one day in UTC, oldest first. Without `day`: today."""
        tenant = call.tenant
        day = day or datetime.fromtimestamp(time.time(), UTC).date()
        start = datetime.combine(day, clock(), UTC)
        resource = None if event_type == "all" else event_type.removesuffix("s")
        events = await services.audit.between(tenant, start.timestamp(), start.timestamp() + DAY_S, resource)
        return reply(
            {
                "entries": [
                    {
                        "timestamp": timestamp(event.at),
                        "event": event.event,
                        "event_details": event.details,
                        "model_id": event.details.get("model_id"),
                        "tinker_path": event.details.get("tinker_path"),
                    }
                    for event in events
                ]
            }
        )

    return routes
