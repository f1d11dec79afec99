"""The access log: one line for each request except long polls and heartbeats, in the logger `skyrl.access`. Off by
default: at thousands of requests a second it is not free."""

from __future__ import annotations

import logging
import time

from skyrl.runtime.processes.logs import about_request, plain
from skyrl.server.api.call import Call
from skyrl.server.api.tracing import UNTRACED

logger = logging.getLogger("skyrl.access")


class AccessLog:
    """A hook. A line has the method, the route, the status, the time until the answer began, the tenant, and the id
    of the command or sample that was recorded: the engine and vLLM log that id."""

    name = "access log"

    def begin(self, call: Call) -> None:
        """Nothing to do: the call has the time of its arrival."""

    def end(self, call: Call) -> None:
        scope = call.scope
        if call.route is not None and call.route.path in UNTRACED:
            return
        path = plain(scope["path"]) if call.route is None else call.route.path
        milliseconds = round((time.perf_counter() - call.began) * 1e3, 1)
        tenant = None if call.known_tenant is None else call.known_tenant[:8]
        about = {"route": path, "status": call.status, "duration_ms": milliseconds, "tenant": tenant}
        extra = about_request(call.id, **about, recorded=call.recorded)
        line = f"{scope['method']} {path} {call.status} {milliseconds:.1f} ms {tenant or '-'} {call.recorded or '-'}"
        logger.info("%s", line, extra=extra)
