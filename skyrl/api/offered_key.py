"""The API key of a request, or the token in its place: from `X-API-Key`, else from `Authorization: Bearer`.

The Tinker SDK sends the first header, OpenAI clients the second. With both, the first one counts.
"""

from __future__ import annotations

from starlette.requests import Request

_BEARER = "bearer "


def offered_key(request: Request) -> str:
    """Empty if the request has none. The key is not checked."""
    if key := request.headers.get("x-api-key", ""):
        return key
    authorization = request.headers.get("authorization", "")
    return authorization[len(_BEARER) :].strip() if authorization[: len(_BEARER)].lower() == _BEARER else ""
