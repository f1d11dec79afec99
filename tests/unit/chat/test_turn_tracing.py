"""A turn's span, as a collector gets it."""

from __future__ import annotations

import asyncio

import pytest
from one_turn import turn

from skyrl.chat.agents.turns import TurnSpan
from skyrl.runtime.tracing import OtlpSpans, RequestTrace, SpanContext, current_trace
from tests.otlp_receiver import Received, collector

REQUEST = SpanContext.new()


async def traced(fails: type[BaseException] | None = None) -> dict[str, Received]:
    """The spans of a turn with one forwarded request, in a task of its own as turns run in."""

    async def run() -> None:
        trace = current_trace.get()
        assert trace is not None
        with TurnSpan("s1", "t1", 0.5) as span:
            inner = current_trace.get()
            assert inner is not None
            inner.child("forward", "client").end()
            if fails is not None:
                raise fails
            span.answered([turn(4, "branch", forked_at=2), turn(5, "asked_again")])
        assert current_trace.get() is trace, "what comes after the turn belongs to the request"

    with collector() as received:
        spans = OtlpSpans(received.url, "api-0", "1")
        token = current_trace.set(RequestTrace(spans, REQUEST))
        await asyncio.gather(asyncio.create_task(run()), return_exceptions=fails is not None)
        current_trace.reset(token)
        await asyncio.to_thread(spans.close)
        return received.wait_for("turn", "forward", trace=f"{REQUEST.trace_id:032x}")


async def test_a_turn_is_a_child_of_its_request_and_the_parent_of_what_is_forwarded() -> None:
    found = await traced()
    assert found["turn"].parent == f"{REQUEST.span_id:016x}"
    assert found["forward"].parent == found["turn"].span
    assert found["turn"].error is None
    assert found["turn"].end_ns - found["turn"].start_ns >= 0.5e9, "the time before the turn's task counts"
    assert found["turn"].attributes == {
        "skyrl.agent_session_id": "s1",
        "skyrl.turn_id": "t1",
        "skyrl.own_s": 0.5,
        "skyrl.dialect": "messages",
        "skyrl.prompt_tokens": 10,
        "skyrl.cached_tokens": 7,
        "skyrl.added_tokens": 3,
        "skyrl.sampled_tokens": 9,
        "skyrl.fork": "branch",
        "skyrl.forked_at": 2,
    }


@pytest.mark.parametrize("error", [ValueError, asyncio.CancelledError])
async def test_a_turn_that_fails_has_a_failed_span_with_its_ids(error: type[BaseException]) -> None:
    found = await traced(error)
    assert found["turn"].error == error.__name__
    assert found["turn"].attributes["skyrl.turn_id"] == "t1"


def test_a_turn_whose_request_is_not_traced_has_no_span() -> None:
    with TurnSpan("s1", "t1", 0.5) as span:
        assert current_trace.get() is None
        span.answered([turn(1)])
