"""The caller behind an API key or a token: its tenant and its scopes.

Answers from memory. Knows no routes: each route declares the scope that it needs. A key or a token comes in
`X-API-Key` (the Tinker SDK) or in `Authorization: Bearer` (OpenAI clients); with both, the first one counts.

- A token stands for a key for an hour. It is a JWT signed with a secret that only this server has. The SDK reads its
  claims without asking the server (`whoami`).
- The key of an agent session is `ska-<session>-<tenant>-<signature>`, so that it is checked without the database.
  Whether the session still takes requests is not asked here."""

from __future__ import annotations

import hashlib
import hmac
import time
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import jwt
from starlette.datastructures import Headers

from skyrl.api.signed_links import stored_secret
from skyrl.base.wire.errors import InvalidToken, RequestError
from skyrl.storage.db.keys import ALL_SCOPES, SCOPES, ApiKey
from skyrl.storage.db.row_caches import Keys

_BEARER = "bearer "
MAX_KEY = 2_000
"""The most characters of a key or a token. Caches keep the last 4,096 keys in memory."""


def offered_key(headers: Headers) -> str:
    """Empty if a request with these headers has none. The key is not checked."""
    if key := headers.get("x-api-key", ""):
        return key
    authorization = headers.get("authorization", "")
    return authorization[len(_BEARER) :].strip() if authorization[: len(_BEARER)].lower() == _BEARER else ""


_PREFIX = "ska-"
_PURPOSE = b"skyrl agent session key\0"
"""Signed with the text of a key, because the secret signs tokens, too."""
_SIGNATURE_BYTES = 20


def is_agent_key(key: str) -> bool:
    return key.startswith(_PREFIX)


class AgentKeys:
    """`secret` is the one that only this server has."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self.read = lru_cache(maxsize=4096)(self._read)

    def issue(self, session_id: str, tenant: str) -> str:
        """The key of a session. Session ids and tenants have letters and digits alone."""
        return f"{_PREFIX}{session_id}-{tenant}-{self._signature(session_id, tenant)}"

    def _read(self, key: str) -> tuple[str, str]:
        """The session and the tenant of a key. Raises RequestError 401."""
        parts = key.split("-")
        if len(parts) == 4 and hmac.compare_digest(parts[3].encode(), self._signature(parts[1], parts[2]).encode()):
            return parts[1], parts[2]
        raise RequestError("this key of an agent session was not made by this server", status=401)

    def _signature(self, session_id: str, tenant: str) -> str:
        signed = _PURPOSE + f"{session_id}-{tenant}".encode()
        return hmac.new(self._secret, signed, hashlib.sha256).digest()[:_SIGNATURE_BYTES].hex()


LIFETIME_S = 3600
_ALGORITHM = "HS256"
_ISSUER = "passport-skyrl"
"""The SDK reads the claims of a token only if its issuer begins with `passport-`."""
_USER_URN = "tml:user:"


def tenant_of_key(key: str) -> str:
    """The tenant of an API key that the operator did not make: a digest, so that no key is ever stored."""
    return hashlib.blake2b(key.encode(), digest_size=16).hexdigest()


def user_urn(tenant: str) -> str:
    """A tenant's name on the wire. Each tenant is one user, and an organization of its own."""
    return _USER_URN + tenant


def is_token(key: str) -> bool:
    """Whether an API key has a token's form: three parts, the first a JSON object in base64."""
    return key.startswith("eyJ") and key.count(".") == 2


class TokenClaims(NamedTuple):
    """The tenant of a token, and the id of the key it was made for (None: the operator did not make that key)."""

    tenant: str
    key_id: str | None


class Tokens:
    """Makes and reads tokens. The secret is in the state directory, so tokens survive a restart."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self.agent_keys = AgentKeys(secret)
        """Signed with the same secret."""

    @classmethod
    def open(cls, state_dir: Path) -> Tokens:
        """Uses the secret in `state_dir`, made at first use."""
        return cls(stored_secret(state_dir / "token-secret"))

    def issue(self, tenant: str, key_id: str | None = None) -> str:
        """A token that stands for a tenant's key for an hour. `key_id` is the id of a key that the operator made. The
        SDK reads `email`; this server knows no address."""
        now = int(time.time())
        claims = {
            "iss": _ISSUER,
            "sub": user_urn(tenant),
            "org_id": tenant,
            "email": "",
            "iat": now,
            "exp": now + LIFETIME_S,
        }
        if key_id is not None:
            claims["key_id"] = key_id
        return jwt.encode(claims, self._secret, algorithm=_ALGORITHM)

    def read(self, token: str) -> TokenClaims:
        """The claims of a token. Raises InvalidToken."""
        try:
            claims = jwt.decode(
                token,
                self._secret,
                algorithms=[_ALGORITHM],
                issuer=_ISSUER,
                options={"require": ["exp", "iat", "sub"]},
            )
        except jwt.ExpiredSignatureError as error:
            raise InvalidToken("the token has expired; get a new one") from error
        except jwt.InvalidTokenError as error:
            raise InvalidToken(f"the token was not made by this server: {error}") from error
        return TokenClaims(str(claims["sub"]).removeprefix(_USER_URN), claims.get("key_id"))


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

    def __init__(self, keys: Keys, tokens: Tokens, *, managed: bool) -> None:
        self.keys = keys
        self.tokens = tokens
        self.managed = managed

    def caller(self, key_or_token: str) -> Caller:
        """The caller that an API key or a token stands for.

        Raises RequestError 401 for a key that is not accepted, InvalidToken for a token that is not.
        """
        if len(key_or_token) > MAX_KEY:
            raise RequestError(f"the API key has more than {MAX_KEY} characters", status=401)
        if is_token(key_or_token):
            return self._caller_of_token(key_or_token)
        if is_agent_key(key_or_token):
            session_id, tenant = self.tokens.agent_keys.read(key_or_token)
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
