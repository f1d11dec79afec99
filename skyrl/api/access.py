"""Whom a key or a token stands for, and which scopes it has.

Everything is answered from memory. Knows no routes: each declares the scope that it needs.
"""

from __future__ import annotations

from dataclasses import dataclass

from skyrl.api.tokens import Tokens, is_token, tenant_of_key
from skyrl.db.keys import ALL_SCOPES, SCOPES, ApiKey, Keys, Scope
from skyrl.wire.errors import InvalidToken, RequestError


@dataclass(frozen=True, slots=True)
class Caller:
    """Whom a key or a token stands for. `key` is None where the operator has not made it."""

    tenant: str
    scopes: frozenset[str]
    key: ApiKey | None = None


class Access:
    """Tells callers from each other. Unless keys are `managed`, one that nobody made is a tenant of its own."""

    def __init__(self, keys: Keys, tokens: Tokens, *, managed: bool) -> None:
        self.keys = keys
        self.tokens = tokens
        self.managed = managed

    def caller(self, given: str) -> Caller:
        """Whom an API key or a token stands for.

        Raises RequestError 401 for a key that is not taken, InvalidToken for a token that is not.
        """
        if is_token(given):
            return self._bearer(given)
        key = self.keys.find(given)
        if key is None:
            if self.managed:
                raise RequestError("this API key is unknown here, or was revoked", status=401)
            return Caller(tenant_of_key(given), ALL_SCOPES)
        if key.expired:
            raise RequestError("this API key has expired", status=401)
        return self._holder(key)

    def _bearer(self, token: str) -> Caller:
        said = self.tokens.read(token)
        if said.key_id is None and not self.managed:
            return Caller(said.tenant, ALL_SCOPES)
        key = None if said.key_id is None else self.keys.with_id(said.key_id)
        if key is None or key.expired:
            raise InvalidToken("the API key that the token in X-API-Key was made for does not hold any more")
        return self._holder(key)

    def _holder(self, key: ApiKey) -> Caller:
        self.keys.use(key)
        return Caller(key.tenant, key.scopes, key)

    def reader(self, given: str, field: str = "weights_access_token") -> str:
        """The tenant whose weights somebody else may read who has its key or token.

        Raises RequestError 403 naming the field: its user is to get another, not to sign in again.
        """
        try:
            caller = self.caller(given)
            check_scope(caller, "train")
        except InvalidToken as error:
            message = "has expired, does not hold any more, or was not made by this server"
            raise RequestError(message, field=field, status=403) from error
        except RequestError as error:
            raise RequestError(error.message, field=field, status=403) from error
        return caller.tenant


def check_scope(caller: Caller, needed: Scope) -> None:
    """Raises RequestError 403 naming the scope that the caller's key lacks."""
    if needed not in caller.scopes:
        has = ", ".join(scope for scope in SCOPES if scope in caller.scopes)
        raise RequestError(f"this needs an API key with the scope {needed!r}; the given one has: {has}", status=403)
