"""Collects the requests that the server accepted and the results that it sent, and compares them with the results that
it gives when they are read again.
"""

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
"""The time for reading all results again. They exist already, so the reads do not wait for work."""
REPEATED_HEADERS = ("x-api-key", "accept", "x-tinker-request-type")


@dataclass
class Promise:
    """An accepted request, the headers of the polls for its result, and the results that clients got (normally one)."""

    path: str
    headers: dict[str, str] = field(default_factory=dict)
    results: set[bytes] = field(default_factory=set)


def promises(calls: Iterable[Call]) -> dict[str, Promise]:
    """By request id: every request whose acceptance reached a client."""
    accepted: dict[str, Promise] = {}
    results: dict[str, set[bytes]] = defaultdict(set)
    for call in calls:
        if call.told != HTTPStatus.OK or call.method != "POST":
            continue
        if call.path.endswith("/retrieve_future"):
            results[json.loads(call.body)["request_id"]].add(call.answers[-1].body)
            continue
        with suppress(ValueError):
            answer = call.answers[-1].json()
            if isinstance(answer, dict) and "request_id" in answer:
                path = call.path.rpartition("/")[2]
                accepted.setdefault(answer["request_id"], Promise(path, _repeated_headers(call)))
    for call in calls:
        if call.path.endswith("/retrieve_future"):
            promise = accepted.get(json.loads(call.body)["request_id"])
            if promise is not None:
                promise.headers |= _repeated_headers(call)
    for request_id, bodies in results.items():
        accepted.setdefault(request_id, Promise("unknown")).results |= bodies
    return accepted


def _repeated_headers(call: Call) -> dict[str, str]:
    return {name: value for name, value in call.headers.items() if name.lower() in REPEATED_HEADERS}


@dataclass
class Findings:
    """`accepted`: the number of accepted requests. `lost`: those without a result, or with a failure. `differing`:
    those with more than one result, or with another result when it was read again."""

    accepted: int = 0
    lost: list[str] = field(default_factory=list)
    differing: list[str] = field(default_factory=list)


def read_again(url: str, accepted: dict[str, Promise]) -> Findings:
    """Read every result once more, from the server without the proxy."""
    findings = Findings(len(accepted))
    deadline = time.monotonic() + READ_S
    with httpx.Client(base_url=url, timeout=60.0, trust_env=False) as client:
        for request_id, promise in accepted.items():
            name = f"{promise.path} {request_id}"
            content = _read(client, request_id, promise.headers, deadline)
            if content is None or is_failure(content):
                reason = b"no result" if content is None else content
                findings.lost.append(f"{name}: {reason[:300].decode(errors='replace')}")
            elif promise.results - {content}:
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
