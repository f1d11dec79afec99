"""One trace follows a request through all its steps: in the API process, to the inference server, and in the engine
through a restart."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from api_harness import SAMPLE, Api, Serve, sample_body, tokens
from engine_harness import Harness, Trainer, harness_in
from fake_upstream import FakeUpstream, error
from openai_requests import DEAD, PROMPT, ask, events, piece

from skyrl.base.types.requests import Kind
from skyrl.engine.telemetry import CommandTracing
from skyrl.runtime.tracing import OtlpSpans, RequestTrace, SpanContext, current_trace
from tests.otlp_receiver import Collector, collector

CALLER = SpanContext(0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331)
TRACE = f"{CALLER.trace_id:032x}"
ASKED = {"traceparent": CALLER.traceparent}


@pytest.fixture
def received() -> Iterator[Collector]:
    with collector() as running:
        yield running


async def sampled(api: Api, **headers: str) -> None:
    promise = await api.post("asample", sample_body(await api.sampler(), 1), **headers)
    assert tokens(await api.post("retrieve_future", {"request_id": promise.json()["request_id"]}, **SAMPLE))


async def test_a_sample_is_one_trace_from_the_caller_to_the_inference_server(
    serve: Serve, upstream: FakeUpstream, received: Collector
) -> None:
    async with serve(otlp_endpoint=received.url, trace_ratio=0.0) as api:
        await sampled(api, **ASKED, **{"X-Request-Id": "r-1"})
    spans = received.wait_for("asample", "record", "forward", "settle", trace=TRACE)
    asked = spans["asample"]
    assert asked.parent == f"{CALLER.span_id:016x}"
    assert asked.attributes["http.request.id"] == "r-1"
    assert {spans[name].parent for name in ("record", "forward", "settle")} == {asked.span}
    (sent,) = upstream.completions
    assert sent.headers["traceparent"] == f"00-{TRACE}-{spans['forward'].span}-01", "vLLM's span is a child of it"
    order = [spans["record"].end_ns, spans["forward"].start_ns, spans["forward"].end_ns, spans["settle"].end_ns]
    assert order == sorted(order)
    about = spans["record"].attributes
    assert about["skyrl.kind"] == "EXTERNAL"
    assert about["skyrl.request_id"] == spans["settle"].attributes["skyrl.request_id"]
    assert {span.name for span in received.spans} == {"asample", "record", "forward", "settle"}, "no polls"


async def test_a_failed_sample_has_failed_spans(serve: Serve, upstream: FakeUpstream, received: Collector) -> None:
    upstream.default = error(400, "no such thing")
    async with serve(otlp_endpoint=received.url, trace_ratio=0.0) as api:
        promise = await api.post("asample", sample_body(await api.sampler(), 1), **ASKED)
        await api.post("retrieve_future", {"request_id": promise.json()["request_id"]}, **SAMPLE)
    spans = received.wait_for("forward", "settle", trace=TRACE)
    assert spans["forward"].error == "FailedRequest"
    assert "no such thing" in (spans["settle"].error or "")


async def test_a_stream_has_a_span_until_its_end(serve: Serve, upstream: FakeUpstream, received: Collector) -> None:
    upstream.default = events(piece("a", 1), piece("b", 2), DEAD)
    async with serve(otlp_endpoint=received.url, trace_ratio=0.0) as api:
        await ask(api, PROMPT | {"stream": True}, **ASKED)
    spans = received.wait_for("forward", "stream", trace=TRACE)
    assert spans["forward"].error is None
    assert spans["forward"].attributes["gen_ai.operation.name"] == "text_completion"
    assert spans["stream"].error == "inference_failed"
    assert spans["stream"].attributes["skyrl.sampled_tokens"] == 2


async def test_without_a_caller_the_ratio_decides_and_nothing_is_sent_without_a_collector(
    serve: Serve, upstream: FakeUpstream, received: Collector
) -> None:
    async with serve(otlp_endpoint=received.url, trace_ratio=0.0) as api:
        await sampled(api)
    assert received.spans == []
    async with serve(otlp_endpoint=received.url, trace_ratio=1.0) as api:
        await sampled(api)
        assert current_trace.get() is None, "the trace belongs to the request alone"
    assert {"asample", "create_session", "forward"} <= {span.name for span in received.spans}
    async with serve() as api:
        await sampled(api, **ASKED)
    assert "traceparent" not in upstream.completions[-1].headers


async def test_a_command_is_one_trace_through_a_restart_of_the_engine(tmp_path: Path, received: Collector) -> None:
    """The pass has run when the engine dies in the step: the next engine repeats the pass and runs the step."""
    spans = OtlpSpans(received.url, "engine", "1")
    tracing = CommandTracing(spans)
    async with harness_in(tmp_path / "state") as harness:
        await harness.start(tracing=tracing)
        trainer = await Trainer.create(harness)
        await trainer.state()
        current_trace.set(RequestTrace(spans, CALLER))
        passed = await trainer.forward_backward(1)
        await trainer.outcome(passed)
        current_trace.set(None)
        stepped = await killed_in_a_step(harness, trainer)
        await harness.start(tracing=tracing)
        await trainer.outcome(stepped)
        await harness.stop()
    await asyncio.to_thread(spans.close)
    found = received.wait_for("record", "queue", "run", "repeat", trace=TRACE)
    assert {span.attributes["skyrl.request_id"] for span in found.values()} == {passed}
    assert found["repeat"].attributes["skyrl.replayed"] is True
    assert {span.parent for span in found.values()} == {f"{CALLER.span_id:016x}"}
    assert found["queue"].end_ns == found["run"].start_ns
    assert stepped not in {span.attributes["skyrl.request_id"] for span in received.spans}, "it was not traced"


async def killed_in_a_step(harness: Harness, trainer: Trainer) -> str:
    harness.kill_before_commit_of(lambda _: True)
    request_id = await trainer.send(Kind.OPTIM_STEP, adam_params={"learning_rate": 0.01})
    await harness.wait_until_killed()
    return request_id
