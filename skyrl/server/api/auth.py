"""API keys: get a token for a key, describe a key, and revoke a key with itself."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from skyrl.base.wire.errors import RequestError
from skyrl.server.api.access import Caller
from skyrl.server.api.call import Call
from skyrl.server.api.offered_key import offered_key
from skyrl.server.api.reply import reply, timestamp
from skyrl.server.api.routes import API, Routes
from skyrl.server.api.services import Services
from skyrl.server.api.tokens import is_token
from skyrl.storage.db.keys import SCOPES

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


def router(services: Services) -> Routes:
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
