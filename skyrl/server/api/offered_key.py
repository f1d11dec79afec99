"""The API key of a request, or the token in its place: from `X-API-Key`, else from `Authorization: Bearer`.

The Tinker SDK sends the first header, OpenAI clients the second. With both, the first one counts.
"""

from __future__ import annotations

from starlette.datastructures import Headers

_BEARER = "bearer "


def offered_key(headers: Headers) -> str:
    """Empty if a request with these headers has none. The key is not checked."""
    if key := headers.get("x-api-key", ""):
        return key
    authorization = headers.get("authorization", "")
    return authorization[len(_BEARER) :].strip() if authorization[: len(_BEARER)].lower() == _BEARER else ""
