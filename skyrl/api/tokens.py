"""Tokens, which stand for an API key for a while, and the tenant that a key stands for which nobody made.

Knows signatures, not which keys hold. A token is a JWT signed with a secret that only this server has; it says what the
SDK reads from it (`whoami` asks nobody).
"""

from __future__ import annotations

import hashlib
import time
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import jwt

from skyrl.api.signing import stored_secret
from skyrl.wire.errors import InvalidToken

LIFETIME_S = 3600
_ALGORITHM = "HS256"
_ISSUER = "passport-skyrl"
"""The SDK takes a key for a token that says who it is by the first half of this name."""
_USER_URN = "tml:user:"


@lru_cache(maxsize=4096)
def tenant_of_key(key: str) -> str:
    """The tenant an API key stands for: a digest, so that no key is ever stored."""
    return hashlib.blake2b(key.encode(), digest_size=16).hexdigest()


def user_urn(tenant: str) -> str:
    """What the wire calls a tenant. Each is one user, and an organization of its own."""
    return _USER_URN + tenant


def is_token(key: str) -> bool:
    """Whether what came as an API key has a token's form: three parts, the first a JSON object in base64."""
    return key.startswith("eyJ") and key.count(".") == 2


class TokenClaims(NamedTuple):
    """Whose a token is, and which key it was made for (None: one that the operator did not make)."""

    tenant: str
    key_id: str | None


class Tokens:
    """Makes and reads tokens. The secret lies in the state directory, so tokens survive a restart."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    @classmethod
    def open(cls, state_dir: Path) -> Tokens:
        """With the secret in `state_dir`, made at first use."""
        return cls(stored_secret(state_dir / "token-secret"))

    def issue(self, tenant: str, key_id: str | None = None) -> str:
        """A token that stands for a tenant's key for an hour; `key_id` is of one that the operator made. There is no
        e-mail address to tell."""
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
        """What a token says. Raises InvalidToken."""
        try:
            claims = jwt.decode(
                token,
                self._secret,
                algorithms=[_ALGORITHM],
                issuer=_ISSUER,
                options={"require": ["exp", "iat", "sub"]},
            )
        except jwt.ExpiredSignatureError as error:
            raise InvalidToken("the token in X-API-Key has expired; get a new one") from error
        except jwt.InvalidTokenError as error:
            raise InvalidToken(f"the token in X-API-Key was not made by this server: {error}") from error
        return TokenClaims(str(claims["sub"]).removeprefix(_USER_URN), claims.get("key_id"))
