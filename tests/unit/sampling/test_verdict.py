"""The verdicts on the answers of skyrl's router. tests/component/api/test_forwarding_failures.py has the other
answers."""

from __future__ import annotations

import pytest

from skyrl.http.answers import Answer
from skyrl.router.messages import BUSY, INTERRUPTED, NO_WORKER, refusal
from skyrl.sampling.servers import Verdict, verdict_of


@pytest.mark.parametrize(
    ("status", "code", "verdict"),
    [
        (502, INTERRUPTED, Verdict.INTERRUPTED),
        (503, NO_WORKER, Verdict.WAIT),
        (503, BUSY, Verdict.WAIT),
        (413, "body_too_large", Verdict.REFUSE),
        (401, "unauthorized", Verdict.FAIL),
    ],
)
def test_a_refusal_of_the_router_has_its_verdict(status: int, code: str, verdict: Verdict) -> None:
    body = refusal(status, code, "why").body
    assert verdict_of(Answer(status, body), has_adapter=True) is verdict


@pytest.mark.parametrize(
    "body",
    [b"", b"<html>", b"\xff", b"[]", b"{}", b'{"error": "worker_interrupted"}', b'{"error": {"code": 502}}'],
)
def test_another_502_means_that_a_proxy_got_no_answer(body: bytes) -> None:
    assert verdict_of(Answer(502, body), has_adapter=False) is Verdict.WAIT_LONGER
