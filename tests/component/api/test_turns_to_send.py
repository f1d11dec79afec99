"""Samples and OpenAI requests that wait in the API process, because the inference server has as many as are sent to it
at a time."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest
from api_harness import BASE, Api, Serve, sample_body
from engine_harness import until
from fake_upstream import FakeUpstream, after, complete, never

from skyrl.api.request_status.finding import of_forwarded
from skyrl.sampling import slots
from skyrl.sampling.base_model import ForwardedSamples

pytestmark = pytest.mark.usefixtures("drain_at_once")

FLOOD, OTHER = {"X-API-Key": "tml-flood"}, {"X-API-Key": "tml-other"}
CHAT: dict[str, Any] = {"model": BASE, "messages": [{"role": "user", "content": "x"}], "max_tokens": 4}


@pytest.fixture
def nothing_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """No request counts as one that has passed vLLM's front end, however slow the machine is."""
    monkeypatch.setattr(slots, "PASSED_S", 1e6)


async def send(api: Api, headers: dict[str, str], sampler: str, count: int, **fields: Any) -> list[str]:
    bodies = [sample_body(sampler, seq_id) | fields for seq_id in range(count)]
    return [(await api.post("asample", body, **headers)).json()["request_id"] for body in bodies]


def forwarded(api: Api) -> ForwardedSamples:
    return api.services.served[0].sampling.forwarded


def held_back(api: Api) -> int:
    held = api.services.served[0].sampling.gate.slots
    assert held is not None
    return held.waiting


async def until_held_back(api: Api, count: int) -> None:
    await until(lambda: held_back(api) == count)


async def test_a_fixed_number_of_requests_is_sent_and_another_tenants_goes_next(
    serve: Serve, upstream: FakeUpstream
) -> None:
    go = asyncio.Event()
    upstream.default = after(go, complete())
    async with serve(forwarding_inference_max_connections=2) as api:
        many, few = await api.sampler(**FLOOD), await api.sampler(**OTHER)
        flood = await send(api, FLOOD, many, 20)
        await until_held_back(api, 18)
        assert upstream.busy == 2
        (other,) = await send(api, OTHER, few, 1)
        await until_held_back(api, 19)
        progress = forwarded(api).progress(flood[-1])
        assert progress is not None
        status = of_forwarded(progress, 0, None)
        assert (status.state, "this one waits its turn" in status.sentence) == ("paused_capacity", True)
        assert forwarded(api).progress(flood[0]) != progress
        go.set()
        for request_id, key in (*((each, FLOOD) for each in flood), (other, OTHER)):
            assert (await api.result(request_id, **key)).status_code == 200
        sent = [each.headers["x-session-id"].startswith(few) for each in upstream.completions]
        assert sent.index(True) in (2, 3), "before all that waited"
        assert upstream.most_busy == 2
        assert held_back(api) == 0


@pytest.mark.usefixtures("nothing_passes")
async def test_before_vllms_of_skyrls_own_another_tenant_waits_for_nobody(serve: Serve, upstream: FakeUpstream) -> None:
    upstream.default = never
    async with serve() as api:
        many, few = await api.sampler(**FLOOD), await api.sampler(**OTHER)
        await send(api, FLOOD, many, 150)
        await until(lambda: held_back(api) + upstream.busy == 150)
        assert held_back(api) > 0
        await send(api, OTHER, few, 2)
        await until(lambda: sum(e.headers["x-session-id"].startswith(few) for e in upstream.completions) == 2)
        await api.finish(many)
        await api.post(f"sessions/{few.partition(':')[0]}/finish", {}, **OTHER)


async def test_what_waits_to_be_sent_is_left_when_the_process_ends(serve: Serve, upstream: FakeUpstream) -> None:
    go = asyncio.Event()
    upstream.default = after(go, complete())
    async with serve(forwarding_inference_max_connections=1) as api:
        sampler = await api.sampler(**FLOOD)
        await send(api, FLOOD, sampler, 3)
        await until_held_back(api, 2)
        ending = asyncio.create_task(api.services.sampling.drain(30.0))
        await until_held_back(api, 0)
        go.set()
        await ending
        assert len(upstream.completions) == 1
    async with serve():
        await upstream.until(lambda server: len(server.completions) == 3)


async def test_chats_wait_for_their_turn_as_samples_do(serve: Serve, upstream: FakeUpstream) -> None:
    upstream.default = never
    async with serve(forwarding_inference_max_connections=1) as api:
        await send(api, FLOOD, await api.sampler(**FLOOD), 1)
        await upstream.until(lambda server: server.busy == 1)
        chat = asyncio.create_task(api.http.post("/oai/api/v1/chat/completions", json=CHAT, headers=FLOOD))
        await until_held_back(api, 1)
        chat.cancel()
        await until_held_back(api, 0)
        assert re.search(r"^skyrl_samples_held_back\{.*\} 0.0$", (await api.http.get("/metrics")).text, re.M)


async def test_requests_that_wait_fail_when_the_server_answers_nothing(serve: Serve, upstream: FakeUpstream) -> None:
    upstream.default = never
    async with serve(forwarding_inference_max_connections=1, forwarding_deadline_s=0.5) as api:
        first, *_, last = await send(api, FLOOD, await api.sampler(**FLOOD), 4)
        chat = await api.http.post("/oai/api/v1/chat/completions", json=CHAT, headers=FLOOD)
        assert chat.status_code == 503
        assert "did not complete this request" in chat.text
        failed = (await api.result(last, **FLOOD)).json()
        assert failed["error"].startswith("the inference server has answered no request for 0.5 s")
        assert failed["category"] == "server"
        assert "no whole answer in time" in (await api.result(first, **FLOOD)).json()["error"]


@pytest.mark.usefixtures("nothing_passes")
async def test_scores_of_prompts_take_more_of_what_is_sent_at_a_time(serve: Serve, upstream: FakeUpstream) -> None:
    upstream.default = never
    async with serve() as api:
        sampler = await api.sampler(**FLOOD)
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [5] * 19}]}
        await send(api, FLOOD, sampler, 90, prompt=prompt, prompt_logprobs=True, topk_prompt_logprobs=64)
        await until(lambda: held_back(api) == 90 - upstream.busy)
        assert 20 < upstream.busy < 60, "without scores all 90 would be there"
        await api.finish(sampler)
