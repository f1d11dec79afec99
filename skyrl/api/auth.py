"""Keys and tokens: a key's token, and what there is to say of a key.

Any key is taken and is a tenant of its own, so there is no list of keys: none can be looked up, and none revoked.
"""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from skyrl.api.body import key_of, tenant_of
from skyrl.api.reply import reply
from skyrl.api.services import Services
from skyrl.api.tokens import is_token
from skyrl.wire.errors import RequestError

_KEY_ID_BITS = 53
"""What every reader of JSON takes as a whole number."""


def router(services: Services) -> APIRouter:
    routes = APIRouter(prefix="/api/v1/auth", tags=["auth"])

    @routes.post("/token")
    async def token(request: Request) -> Response:
        """A token for a key. A token is answered with itself: it ends when it ends, whoever holds it."""
        tenant, key = tenant_of(request), key_of(request)
        return reply({"jwt": key if is_token(key) else services.tokens.issue(tenant)})

    @routes.get("/apikey/me")
    async def own_key(request: Request) -> Response:
        tenant = tenant_of(request)
        return reply(
            {
                "key_id": int(tenant, 16) >> (128 - _KEY_ID_BITS),
                "name": f"key of tenant {tenant[:8]}",
                "note": "This server keeps no list of keys: any key is taken, and is a tenant of its own.",
                "details": {
                    "org_details": {"name": f"skyrl at {request.url.netloc}"},
                    "user_details": {"email": f"tenant {tenant[:8]}"},
                },
            }
        )

    @routes.delete("/apikey/me")
    async def delete_own_key(request: Request) -> Response:
        tenant_of(request)
        raise RequestError(
            "this server keeps no list of keys, so that there is none to delete: any key is taken, this one too",
            status=403,
        )

    return routes
