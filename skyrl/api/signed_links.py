"""Links that need no API key: a path and an expiry, signed with a secret that only this server has.

Knows paths and clocks. Does not know what a link leads to: the access check calls `verify` before the route, and the
route decides whether the file or trace still exists.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from starlette.requests import Request

from skyrl.base.wire.errors import RequestError

_SECRET_BYTES = 32


@dataclass(frozen=True)
class SignedUrl:
    """An absolute URL, and when it stops working (seconds since the epoch)."""

    url: str
    expires_at: float


def stored_secret(file: Path) -> bytes:
    """The secret in this file: random bytes, made at first use, readable by this user alone. If several processes make
    the file at once, all read the same one. Raises ValueError for a file that is too short."""
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        scratch = file.parent / f".tmp-{secrets.token_hex(8)}"
        descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(secrets.token_bytes(_SECRET_BYTES))
            stream.flush()
            os.fsync(stream.fileno())
        with suppress(FileExistsError):
            os.link(scratch, file)
        scratch.unlink()
    secret = file.read_bytes()
    if len(secret) < _SECRET_BYTES:
        raise ValueError(f"{file} holds {len(secret)} bytes, not a secret; delete it, and a new one is made")
    return secret


class SignedUrls:
    """Makes and checks links. The secret is in the state directory, so links survive a restart."""

    def __init__(self, secret: bytes, public_url: str | None = None) -> None:
        self._secret = secret
        self._public_url = public_url

    @classmethod
    def open(cls, state_dir: Path, public_url: str | None = None) -> SignedUrls:
        """Uses the secret in `state_dir`, made at first use."""
        return cls(stored_secret(state_dir / "url-secret"), public_url)

    def sign(self, request: Request, path: str, expires_in_s: float) -> SignedUrl:
        """A link to `path` (from the root: `/api/v1/...`, not yet percent-encoded), under `public_url` if configured,
        else under the host name that the request used."""
        expires_at = int(time.time() + expires_in_s)
        base = (self._public_url or str(request.base_url)).rstrip("/")
        signature = self._signature(path, str(expires_at))
        return SignedUrl(f"{base}{quote(path)}?expires={expires_at}&signature={signature}", expires_at)

    def verify(self, request: Request) -> None:
        """Raises RequestError 403 unless the request's path was signed here and the link has not expired."""
        expires = request.query_params.get("expires", "")
        signature = request.query_params.get("signature", "")
        expected = self._signature(request.scope["path"], expires)
        if not hmac.compare_digest(expected.encode(), signature.encode()):
            raise RequestError(
                "this link was not made by this server; ask for a new one", field="signature", status=403
            )
        if int(expires) <= time.time():
            raise RequestError("this link has expired; ask for a new one", field="expires", status=403)

    def _signature(self, path: str, expires: str) -> str:
        return hmac.new(self._secret, f"{path}\n{expires}".encode(), hashlib.sha256).hexdigest()
