"""Who a request comes from: an API key's digest, or what a token says that was made for such a key.

Knows keys and tokens, not what a tenant owns. A token is a JWT signed with a secret that only this server has; it says
what the SDK reads from it (`whoami` asks nobody) and stands for its key until it expires.
"""

from __future__ import annotations

import hashlib
import time
from functools import lru_cache
from pathlib import Path

import jwt

from skyrl.api.signing import stored_secret
from skyrl.wire.errors import InvalidToken, RequestError

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


class Tokens:
    """Makes and reads tokens. The secret lies in the state directory, so tokens survive a restart."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    @classmethod
    def open(cls, state_dir: Path) -> Tokens:
        """With the secret in `state_dir`, made at first use."""
        return cls(stored_secret(state_dir / "token-secret"))

    def issue(self, tenant: str) -> str:
        """A token that stands for a tenant's key for an hour. There is no e-mail address to tell."""
        now = int(time.time())
        claims = {
            "iss": _ISSUER,
            "sub": user_urn(tenant),
            "org_id": tenant,
            "email": "",
            "iat": now,
            "exp": now + LIFETIME_S,
        }
        return jwt.encode(claims, self._secret, algorithm=_ALGORITHM)

    def tenant(self, token: str) -> str:
        """The tenant a token stands for. Raises InvalidToken."""
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
        return str(claims["sub"]).removeprefix(_USER_URN)


def tenant_of_access_token(tokens: Tokens, given: str, field: str = "weights_access_token") -> str:
    """The tenant that a key or token stands for which somebody else uses, to read what is that tenant's.

    Raises RequestError 403 naming the field: its user is to get another, not to sign in again.
    """
    if not is_token(given):
        return tenant_of_key(given)
    try:
        return tokens.tenant(given)
    except InvalidToken as error:
        raise RequestError("has expired, or was not made by this server", field=field, status=403) from error
