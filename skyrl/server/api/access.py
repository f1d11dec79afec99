"""The caller behind an API key or a token: its tenant and its scopes.

Answers from memory. Knows no routes: each route declares the scope that it needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from skyrl.base.wire.errors import InvalidToken, RequestError
from skyrl.server.api.agent_keys import AgentKeys, is_agent_key
from skyrl.server.api.tokens import Tokens, is_token, tenant_of_key
from skyrl.storage.db.keys import ALL_SCOPES, SCOPES, ApiKey, Keys


@dataclass(frozen=True, slots=True)
class Caller:
    """The tenant that a key or a token stands for, and its scopes. `key` is None for a key that the operator did not
    make. `agent_session` is the session of an agent's key, which has no scope."""

    tenant: str
    scopes: frozenset[str]
    key: ApiKey | None = None
    agent_session: str | None = None


@lru_cache(maxsize=4096)
def _caller_of_unlisted(key: str) -> Caller:
    """The caller behind a key that the operator did not make. Kept, because each request asks for it."""
    return Caller(tenant_of_key(key), ALL_SCOPES)


class Access:
    """Finds the caller of a request. If keys are `managed`, only keys that the operator made are accepted; otherwise
    every other key is accepted too, as a tenant of its own."""

    def __init__(self, keys: Keys, tokens: Tokens, agent_keys: AgentKeys, *, managed: bool) -> None:
        self.keys = keys
        self.tokens = tokens
        self.agent_keys = agent_keys
        self.managed = managed

    def caller(self, key_or_token: str) -> Caller:
        """The caller that an API key or a token stands for.

        Raises RequestError 401 for a key that is not accepted, InvalidToken for a token that is not.
        """
        if is_token(key_or_token):
            return self._caller_of_token(key_or_token)
        if is_agent_key(key_or_token):
            session_id, tenant = self.agent_keys.read(key_or_token)
            return Caller(tenant, frozenset(), agent_session=session_id)
        key = self.keys.find(key_or_token)
        if key is None:
            if self.managed:
                raise RequestError("this API key is unknown here, or was revoked", status=401)
            return _caller_of_unlisted(key_or_token)
        if key.expired:
            raise RequestError("this API key has expired", status=401)
        return self._caller_of_key(key)

    def _caller_of_token(self, token: str) -> Caller:
        claims = self.tokens.read(token)
        if claims.key_id is None and not self.managed:
            return Caller(claims.tenant, ALL_SCOPES)
        key = None if claims.key_id is None else self.keys.with_id(claims.key_id)
        if key is None or key.expired:
            raise InvalidToken("the API key behind the token is no longer accepted")
        return self._caller_of_key(key)

    def _caller_of_key(self, key: ApiKey) -> Caller:
        self.keys.use(key)
        return Caller(key.tenant, key.scopes, key)

    def tenant_of_access_token(self, key_or_token: str, field: str = "weights_access_token") -> str:
        """The tenant that gave the caller this key or token to let it read the tenant's weights.

        Raises RequestError 403 naming the field. A 401 would make the client renew its own key instead.
        """
        try:
            caller = self.caller(key_or_token)
            check_scope(caller, "train")
        except InvalidToken as error:
            message = "has expired, is no longer accepted, or was not made by this server"
            raise RequestError(message, field=field, status=403) from error
        except RequestError as error:
            raise RequestError(error.message, field=field, status=403) from error
        return caller.tenant


def check_route(caller: Caller, needed: str) -> None:
    """Whether a caller may use a route that requires `needed` (a `RouteScope` that takes a key). Raises RequestError
    403."""
    if caller.agent_session is not None:
        if needed != "agent":
            raise RequestError("the key of an agent session can do nothing but ask for the session's turns", status=403)
    elif needed != "any" and caller.scopes != ALL_SCOPES:
        check_scope(caller, "sample" if needed == "agent" else needed)


def check_scope(caller: Caller, needed: str) -> None:
    """Raises RequestError 403 naming the scope that the caller's key lacks."""
    if needed not in caller.scopes:
        granted = ", ".join(scope for scope in SCOPES if scope in caller.scopes)
        raise RequestError(f"this needs an API key with the scope {needed!r}; the given one has: {granted}", status=403)
