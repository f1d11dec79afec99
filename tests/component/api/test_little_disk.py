"""A server with little free disk space: what its clients and its operator are told."""

from __future__ import annotations

import shutil
import time
from types import SimpleNamespace

import pytest
from api_harness import Api

from skyrl.api.bodies import SMALL_BYTES
from skyrl.runtime.processes.host_resources import SPARE_DISK_BYTES


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Less space is free than the server keeps in reserve."""
    usage = SimpleNamespace(free=60 * 2**20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    return usage


async def test_readyz_reports_the_full_disk_and_the_server_stays_ready(api: Api, full: SimpleNamespace) -> None:
    deadline = time.monotonic() + 60
    while True:  # an earlier answer may be cached for a while
        answer = await api.http.get("/readyz")
        (reason,) = answer.json()["reasons"] or [""]
        if reason or time.monotonic() > deadline:
            break
    assert answer.status_code == 200
    assert answer.json()["ready"] is True
    assert reason.startswith("disk: the server's disk has 60 MiB free, less than the 512 MiB")


async def test_a_large_pass_is_refused_with_headers_that_make_the_sdk_print_the_reason(
    api: Api, full: SimpleNamespace
) -> None:
    body = b"x" * (SMALL_BYTES + 1)
    answer = await api.http.post("/api/v1/forward_backward", content=body)
    assert answer.status_code == 503
    assert answer.json()["detail"].startswith("the server's disk is full")
    assert answer.headers["x-should-retry"] == "false"
    assert answer.headers["x-deprecation-level"] == "error"
    assert answer.headers["x-deprecation-note"] == answer.json()["detail"]
    assert float(answer.headers["retry-after"]) > 0
    full.free = SPARE_DISK_BYTES + 2 * len(body)
    answer = await api.http.post("/api/v1/forward_backward", content=body)
    assert answer.status_code == 400, "the body is read now, and is invalid"
