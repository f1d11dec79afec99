"""A middleware that changes requests: nobody samples more tokens than the operator allows.

    skyrl router --worker http://127.0.0.1:30001 --middleware examples/middleware/cap_tokens.py:CapTokens \
        --middleware-options '{"cap_tokens": 512}'
"""

from __future__ import annotations

from collections.abc import Mapping

from skyrl.router.messages import Request, Response
from skyrl.router.middleware import CallNext, RouterMiddleware


class CapTokens(RouterMiddleware):
    """Lowers `max_new_tokens` of /generate to the option `cap_tokens` (default 1024), and says so in a header."""

    capped = 0

    async def handle(self, request: Request, call_next: CallNext) -> Response:
        if request.path != "/generate":
            return await call_next(request)
        try:
            body = await request.json()
            params = body.get("sampling_params") or {}
            wanted = params.get("max_new_tokens", 128)
        except (ValueError, AttributeError):
            return await call_next(request)  # the worker says what is wrong with this body
        limit = self.router.options.get("cap_tokens", 1024)
        if not isinstance(wanted, int) or not isinstance(limit, int) or wanted <= limit:
            return await call_next(request)
        self.capped += 1
        request.set_json({**body, "sampling_params": {**params, "max_new_tokens": limit}})
        response = await call_next(request)
        response.headers.set("x-capped-tokens", str(limit))
        return response

    def stats(self) -> Mapping[str, int | float]:
        return {"capped": self.capped}
