"""`GET /metrics`: the metrics of all processes of this server, for Prometheus."""

from __future__ import annotations

from starlette.responses import Response

from skyrl.base.config.keys import LOOPBACK
from skyrl.runtime.metrics.files import CONTENT_TYPE
from skyrl.server.api.call import Call
from skyrl.server.api.routes import Routes
from skyrl.server.api.services import Services


def router(services: Services) -> Routes:
    """Where any key is accepted and only this machine can ask, no key is needed; elsewhere an admin's."""
    config, published = services.config, services.published_metrics
    routes = Routes("metrics", prefix="")
    is_open = config.api_keys == "open" and config.host in LOOPBACK

    @routes.get("/metrics", scope="open" if is_open else "admin")
    async def metrics(call: Call) -> Response:
        return Response(await published.answer(), headers={"content-type": CONTENT_TYPE})

    return routes
