"""Tokens, which stand for an API key for an hour, and the tenants of keys that the operator did not make.

Knows signatures, not which keys are accepted. A token is a JWT signed with a secret that only this server has. The SDK
reads its claims without asking the server (`whoami`).
"""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from typing import NamedTuple

import jwt

from skyrl.base.wire.errors import InvalidToken
from skyrl.server.api.agent_keys import AgentKeys
from skyrl.server.api.signing import stored_secret

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
