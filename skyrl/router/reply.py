"""An answer of the router itself, small and whole."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from skyrl.router.messages import HeaderList


class Reply(NamedTuple):
    status: int
    headers: HeaderList
    body: bytes


def of_json(status: int, value: Any, headers: HeaderList | None = None) -> Reply:
    body = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
    return Reply(status, [(b"content-type", b"application/json"), *(headers or [])], body)


def error(status: int, code: str, message: str, headers: HeaderList | None = None) -> Reply:
    """`error` is an object with `message`, the form that clients of SGLang, vLLM and the gateways read."""
    return of_json(status, {"error": {"type": code, "code": status, "message": message}}, headers)
