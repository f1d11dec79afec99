"""What the server promised and told, as it went over the wire, and whether it stands by it."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus

import httpx

from tests.e2e.fault_proxy import Call

READ_S = 240.0
"""For all results together; they are there."""
TRAVELLING = ("x-api-key", "accept", "x-tinker-request-type")


@dataclass
class Promise:
    """An accepted request: how its result was asked for, and what was told (normally once)."""

    path: str
    headers: dict[str, str] = field(default_factory=dict)
    told: set[bytes] = field(default_factory=set)


def promises(calls: Iterable[Call]) -> dict[str, Promise]:
    """By request id: everything that the clients were told to have been accepted."""
    found: dict[str, Promise] = {}
    told: dict[str, set[bytes]] = defaultdict(set)
    for call in calls:
        if call.told != HTTPStatus.OK or call.method != "POST":
            continue
        if call.path.endswith("/retrieve_future"):
            told[json.loads(call.body)["request_id"]].add(call.answers[-1].body)
            continue
        with suppress(ValueError):
            answered = call.answers[-1].json()
            if isinstance(answered, dict) and "request_id" in answered:
                found.setdefault(answered["request_id"], Promise(call.path.rpartition("/")[2], _travelling(call)))
    for call in calls:
        if call.path.endswith("/retrieve_future"):
            promise = found.get(json.loads(call.body)["request_id"])
            if promise is not None:
                promise.headers |= _travelling(call)
    for request_id, bodies in told.items():
        found.setdefault(request_id, Promise("unknown")).told |= bodies
    return found


def _travelling(call: Call) -> dict[str, str]:
    return {name: value for name, value in call.headers.items() if name.lower() in TRAVELLING}


@dataclass
class Findings:
    """`lost`: accepted, and there is no good result. `differing`: read again, or told twice, it was another one."""

    accepted: int = 0
    lost: list[str] = field(default_factory=list)
    differing: list[str] = field(default_factory=list)


def settle(url: str, found: dict[str, Promise]) -> Findings:
    """Read every result once more, from the server itself."""
    findings = Findings(len(found))
    deadline = time.monotonic() + READ_S
    with httpx.Client(base_url=url, timeout=60.0, trust_env=False) as client:
        for request_id, promise in found.items():
            name = f"{promise.path} {request_id}"
            content = _read(client, request_id, promise.headers, deadline)
            if content is None or is_failure(content):
                said = b"no result" if content is None else content
                findings.lost.append(f"{name}: {said[:300].decode(errors='replace')}")
            elif promise.told - {content}:
                findings.differing.append(name)
    return findings


def _read(client: httpx.Client, request_id: str, headers: dict[str, str], deadline: float) -> bytes | None:
    while time.monotonic() < deadline:
        with suppress(httpx.TransportError):
            answer = client.post("/api/v1/retrieve_future", json={"request_id": request_id}, headers=headers)
            if answer.status_code == HTTPStatus.OK:
                return answer.content
            if (
                answer.status_code < HTTPStatus.INTERNAL_SERVER_ERROR
                and answer.status_code != HTTPStatus.REQUEST_TIMEOUT
            ):
                return None
    return None


def is_failure(content: bytes) -> bool:
    """Whether a result says that its request failed."""
    try:
        return "error" in json.loads(content)
    except ValueError:  # protobuf
        return False
