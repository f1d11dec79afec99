"""One trace through the real server: from the client's request to the inference server's own span."""

from __future__ import annotations

import httpx
import tinker

from skyrl.cli.demo.server import DemoServer
from skyrl.runtime.tracing import SpanContext
from tests.otlp_receiver import Collector

from .conftest import ClientFactory, cross_entropy


def traced(server: DemoServer, caller: SpanContext) -> tinker.ServiceClient:
    return tinker.ServiceClient(
        base_url=server.url, api_key="tml-traced", default_headers_overrides={"traceparent": caller.traceparent}
    )


def test_a_sample_is_one_trace_down_to_vllms_own_span(server: DemoServer, traces: Collector) -> None:
    caller = SpanContext.new()
    with traced(server, caller) as client:
        sampler = client.create_sampling_client(base_model="tiny").result()
        prompt, params = tinker.ModelInput.from_ints([5, 6, 7]), tinker.SamplingParams(max_tokens=4)
        sampler.sample(prompt, 1, params).result()
    names = ("asample", "record", "forward", "settle", "llm_request")
    spans = traces.wait_for(*names, trace=f"{caller.trace_id:032x}")
    assert spans["llm_request"].parent == spans["forward"].span
    assert spans["forward"].parent == spans["asample"].span
    assert spans["asample"].parent == f"{caller.span_id:016x}"


def test_training_is_traced_in_the_engine(server: DemoServer, traces: Collector) -> None:
    caller = SpanContext.new()
    with traced(server, caller) as client:
        trainer = client.create_lora_training_client(base_model="tiny", rank=4).result()
        trainer.forward_backward([cross_entropy([5, 6, 7, 8])], "cross_entropy").result()
    spans = traces.wait_for("forward_backward", "record", "queue", "run", trace=f"{caller.trace_id:032x}")
    assert {spans[name].service for name in spans} == {"skyrl"}


def test_a_request_that_nobody_asks_to_trace_leaves_no_span(
    server: DemoServer, traces: Collector, connect: ClientFactory
) -> None:
    before = {span.trace for span in traces.spans}
    sampler = connect().create_sampling_client(base_model="tiny").result()
    prompt, params = tinker.ModelInput.from_ints([5, 6, 7]), tinker.SamplingParams(max_tokens=4)
    sampler.sample(prompt, 1, params).result()
    caller = SpanContext.new()
    with httpx.Client(base_url=server.url, headers={"X-API-Key": "k", "traceparent": caller.traceparent}) as http:
        http.post("/api/v1/create_session", json={}).raise_for_status()
    traces.wait_for("create_session", trace=f"{caller.trace_id:032x}")
    assert {span.trace for span in traces.spans} - before == {f"{caller.trace_id:032x}"}
