"""`skyrl rollout` with two real vLLMs, as clients of RL frameworks use it.

This file runs before those that change weights: after a change, a vLLM that is killed stays out until it is updated.
"""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import pytest
import pytest_asyncio

from skyrl.cli.demo.server import DemoServer
from skyrl.rollout import (
    RolloutAnswer,
    RolloutClient,
    RolloutConfig,
    RolloutRequest,
    SamplingParams,
    Trajectory,
    make_strategy,
)
from tests.plane.running import READY_S, RunningPlane, gateway
from tests.sdk_programs import TRACED, succeeded
from tests.servers import SLOW_START_S

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

PROMPT = [265, 296, 83, 315]
GREEDY = {"temperature": 0, "max_new_tokens": 12}
LONG_TOKENS = 3000
LONG = {"max_new_tokens": LONG_TOKENS, "ignore_eos": True}
CONTINUED_TOKENS = 1200
"""Fewer for a sample that is computed to its end."""
TRIES = 5
"""How often requests are begun again that ended by themselves before they were aborted."""
Answer = TypeVar("Answer")
EXAMPLE = Path(__file__).parents[2] / "examples" / "text_rollouts.py"


async def post(session: aiohttp.ClientSession, url: str, body: Any = None) -> Any:
    async with session.post(url, json=body) as answer:
        assert answer.status == 200, await answer.text()
        return await answer.json() if answer.content_type == "application/json" else None


async def load_of(session: aiohttp.ClientSession, worker: str) -> int:
    async with session.get(f"{worker}/v1/loads?include=core") as answer:
        return sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in (await answer.json())["loads"])


async def aborted(
    session: aiohttp.ClientSession,
    workers: list[str],
    begin: Callable[[], list[asyncio.Task[Answer]]],
    abort: Callable[[], Coroutine[Any, Any, object]],
    ended_early: Callable[[Answer], bool],
) -> list[Answer]:
    """The answers to requests that the workers had at the same time, and that were then aborted. On a busy machine one
    may end by itself before: then all are begun again."""
    for _ in range(TRIES):
        tasks = begin()
        while not any(task.done() for task in tasks):
            if sum([await load_of(session, worker) for worker in workers]) >= len(tasks):
                await abort()
                break
            await asyncio.sleep(0.02)
        answers = await asyncio.gather(*tasks)
        if not any(ended_early(answer) for answer in answers):
            return answers
    raise AssertionError(f"the requests ended by themselves {TRIES} times")


def meaning(answer: dict[str, Any]) -> tuple[Any, ...]:
    """What an answer says about the sample."""
    meta = answer["meta_info"]
    return answer["text"], answer["output_ids"], meta["output_token_logprobs"], meta["finish_reason"]


def is_whole(answer: dict[str, Any]) -> bool:
    return answer["meta_info"]["finish_reason"]["type"] == "length"


async def test_the_router_answers_as_each_engine_does(plane: RunningPlane, session: aiohttp.ClientSession) -> None:
    body = {"input_ids": PROMPT, "sampling_params": GREEDY, "return_logprob": True}
    answers = [await post(session, f"{url}/generate", body) for url in (plane.url, *plane.sidecars())]
    first, *others = [meaning(answer) for answer in answers]
    assert all(other[:2] + other[3:] == first[:2] + first[3:] for other in others)
    completion = {"model": "tiny", "prompt": PROMPT, "temperature": 0, "max_tokens": 12, "return_token_ids": True}
    through = await post(session, f"{plane.url}/v1/completions", completion)
    assert through["choices"][0]["token_ids"] == answers[0]["output_ids"]


async def test_a_session_servers_chats_reach_an_engine_through_the_router(
    plane: RunningPlane, session: aiohttp.ClientSession
) -> None:
    """The fields that miles' session server sends at every turn, and what it reads."""
    sampled = await post(
        session, f"{plane.url}/generate", {"input_ids": PROMPT, "sampling_params": GREEDY, "return_logprob": True}
    )
    turn = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Not this."}],
        "temperature": 0,
        "max_tokens": 12,
        "input_ids": PROMPT,
        "logprobs": True,
        "return_meta_info": True,
        "no_stop_trim": False,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    choice = (await post(session, f"{plane.url}/v1/chat/completions", turn))["choices"][0]
    meta = choice["meta_info"]
    assert [one[1] for one in meta["output_token_logprobs"]] == sampled["output_ids"]
    assert len(meta["output_token_logprobs"]) == meta["completion_tokens"] == 12
    assert isinstance(choice["message"]["content"], str)
    assert meta["weight_versions"] == [{"version": "default", "start": 0, "end": 12}]
    for path in ("/v1/chat/completions", "/v1/completions"):
        async with session.post(plane.url + path, json={"model": "tiny", "stop_regex": "a"}) as answer:
            assert (answer.status, (await answer.json())["error"]["message"].partition(":")[0]) == (400, "stop_regex")


async def test_slimes_abort_ends_all_samples_with_what_they_have(
    plane: RunningPlane, session: aiohttp.ClientSession
) -> None:
    """The calls of slime's `abort_server_until_idle`: the list of workers, an abort at each, the load until it is 0."""
    body = {"input_ids": PROMPT, "sampling_params": LONG, "return_logprob": True}
    async with session.get(f"{plane.url}/workers") as answer:
        workers = [worker["url"] for worker in (await answer.json())["workers"]]

    def begin() -> list[asyncio.Task[Any]]:
        return [asyncio.create_task(post(session, f"{plane.url}/generate", body)) for _ in range(6)]

    async def abort() -> None:
        for worker in workers:
            await post(session, f"{worker}/abort_request", {"abort_all": True})
        while any([await load_of(session, worker) for worker in workers]):  # noqa: ASYNC110 - another process sets no event
            await asyncio.sleep(0.05)

    for answer in await aborted(session, workers, begin, abort, is_whole):
        assert answer["meta_info"]["finish_reason"]["type"] == "abort"
        assert len(answer["output_ids"]) == len(answer["meta_info"]["output_token_logprobs"]) < LONG_TOKENS


async def test_an_abort_by_rid_through_the_router_finds_its_engine(
    plane: RunningPlane, session: aiohttp.ClientSession
) -> None:
    rids: list[str] = []

    def begin() -> list[asyncio.Task[Any]]:
        rids[:] = [uuid.uuid4().hex for _ in range(4)]
        bodies = [{"rid": rid, "input_ids": PROMPT, "sampling_params": LONG} for rid in rids]
        return [asyncio.create_task(post(session, f"{plane.url}/generate", body)) for body in bodies]

    async def abort() -> None:
        for rid in rids:
            await post(session, f"{plane.url}/abort_request", {"rid": rid})

    answers = await aborted(session, plane.sidecars(), begin, abort, is_whole)
    assert [answer["meta_info"]["finish_reason"]["type"] for answer in answers] == ["abort"] * 4


async def test_the_radix_cache_gives_the_tokens_that_were_sampled(
    plane: RunningPlane, session: aiohttp.ClientSession
) -> None:
    """Three turns, each after the text of the turns before; the engine's own lists are the truth. All tokens are in the
    texts: a token that is not could not be found by its text."""
    text, sampled = "Count from 3 by 2.", []
    params = {"temperature": 1.0, "max_new_tokens": 16, "skip_special_tokens": False, "no_stop_trim": True}
    for turn in range(3):
        body = {"text": text, "sampling_params": params | {"sampling_seed": turn}, "return_logprob": True}
        answer = await post(session, f"{plane.url}/generate", body)
        sampled += [tuple(triple[:2]) for triple in answer["meta_info"]["output_token_logprobs"]]
        text += answer["text"] + (" And then?" if turn < 2 else "")
    found = await post(session, f"{plane.url}/retrieve_from_text", {"text": text})
    lists = found["rollout_logp"], found["tokens"], found["loss_mask"]
    masked = [(logprob, token) for logprob, token, mask in zip(*lists, strict=True) if mask]
    assert masked == sampled


async def test_the_router_shows_the_metrics_of_the_whole_plane(
    plane: RunningPlane, session: aiohttp.ClientSession
) -> None:
    await post(session, f"{plane.url}/generate", {"text": "One", "sampling_params": {"max_new_tokens": 2}})
    wanted = [f'process_open_fds{{process="{name}"}}' for name in ("launcher", "router", "sidecar-0", "sidecar-1")]
    wanted += [f'vllm:num_requests_running{{engine="0",replica="{number}"}}' for number in (0, 1)]
    wanted += ['skyrl_router_workers{state="healthy",process="router"} 2.0', "skyrl_radix_lookups_total"]
    missing, text = wanted, ""
    while missing:  # each process writes every few seconds; the test's own timeout ends a wait that never ends
        await asyncio.sleep(0.1)
        async with session.get(f"{plane.url}/metrics") as answer:
            text = await answer.text()
        missing = [series for series in wanted if series not in text]
    assert "lora_requests_info" not in text


@pytest.mark.parametrize("module", ["sglang_router", "vllm_router"])
async def test_the_sidecars_work_behind_other_gateways(
    module: str, plane: RunningPlane, session: aiohttp.ClientSession
) -> None:
    body = {"input_ids": PROMPT, "sampling_params": GREEDY, "return_logprob": True}
    direct = await post(session, f"{plane.sidecars()[0]}/generate", body)
    with gateway(module, plane.sidecars()) as client:
        for _ in range(4):
            answer = await asyncio.to_thread(client.post, "/generate", json=body)
            assert answer.status_code == 200, answer.text
            assert answer.json()["output_ids"] == direct["output_ids"]
        text = {"text": "Count from 3 by 2.", "sampling_params": GREEDY}
        assert (await asyncio.to_thread(client.post, "/generate", json=text)).json()["meta_info"]["prompt_tokens"] > 3
        wrong = await asyncio.to_thread(client.post, "/generate", json=body | {"sampling_params": {"top_p": 7.0}})
        assert wrong.status_code == 400
        assert "top_p" in wrong.text
        chat = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "temperature": 0, "max_tokens": 4}
        said = await asyncio.to_thread(client.post, "/v1/chat/completions", json=chat)
        assert said.status_code == 200, said.text
        whole = {"model": "tiny", "prompt": "The old fox", "temperature": 0, "max_tokens": 4}
        said = await asyncio.to_thread(client.post, "/v1/completions", json=whole)
        assert said.status_code == 200, said.text


@pytest_asyncio.fixture
async def client(plane: RunningPlane) -> AsyncIterator[RolloutClient]:
    config = RolloutConfig(
        rollout_router_port=plane.port,
        rollout_num_engines=2,
        rollout_strategy="radix",
        rollout_deterministic_inference=True,
    )
    async with RolloutClient(config) as opened:
        yield opened


LONG_REQUEST = RolloutRequest(input_ids=PROMPT, params=SamplingParams(max_new_tokens=LONG_TOKENS, ignore_eos=True))


def in_one_part(answer: RolloutAnswer) -> bool:
    """Whether it came to its end without an abort."""
    return answer.finish_reason == "length" and len(answer.parts) == 1


async def test_a_group_of_the_client_is_the_same_each_time(client: RolloutClient) -> None:
    request = RolloutRequest(input_ids=PROMPT, params=SamplingParams(max_new_tokens=12, ignore_eos=True))
    first, second = [await client.generate_group(request, 4) for _ in range(2)]
    assert [answer.tokens for answer in first] == [answer.tokens for answer in second]
    assert len({answer.tokens for answer in first}) > 1


async def test_two_turns_of_the_client_keep_the_sampled_tokens(client: RolloutClient) -> None:
    trajectory, strategy = Trajectory(session_id="two turns"), make_strategy(client)
    params = SamplingParams(max_new_tokens=12, ignore_eos=True, skip_special_tokens=False)
    answers = [await strategy.turn(trajectory, text, params) for text in ("Count from 5 by 3.", " Go on.")]
    sampled = [token for token, mask in zip(trajectory.tokens, trajectory.loss_mask, strict=True) if mask]
    assert sampled == [token for answer in answers for token in answer.tokens]


async def test_the_client_continues_a_sample_that_was_aborted(
    plane: RunningPlane, session: aiohttp.ClientSession, client: RolloutClient
) -> None:
    params = SamplingParams(max_new_tokens=CONTINUED_TOKENS, ignore_eos=True)
    (answer,) = await aborted(
        session,
        plane.sidecars(),
        lambda: [asyncio.create_task(client.generate(RolloutRequest(input_ids=PROMPT, params=params)))],
        lambda: post(session, f"{plane.url}/abort_request", {"abort_all": True}),
        in_one_part,
    )
    assert len(answer.parts) > 1
    assert len(answer.tokens) == len(answer.logprobs) == CONTINUED_TOKENS
    assert answer.finish_reason == "length"


async def test_abort_all_of_the_client_returns_what_there_is(
    plane: RunningPlane, session: aiohttp.ClientSession, client: RolloutClient
) -> None:
    answers = await aborted(
        session,
        plane.sidecars(),
        lambda: [asyncio.create_task(client.generate(LONG_REQUEST)) for _ in range(4)],
        client.abort_all,
        in_one_part,
    )
    assert [answer.finish_reason for answer in answers] == ["abort"] * 4
    assert [await load_of(session, worker) for worker in plane.sidecars()] == [0, 0]


@pytest.mark.slow
async def test_a_killed_engine_costs_slimes_loop_no_error_and_comes_back(
    plane: RunningPlane, session: aiohttp.ClientSession
) -> None:
    """slime sends a failed request again, up to 60 times, a second apart. Here the pauses are shorter."""
    stop, failures, answered = asyncio.Event(), [], 0
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 40, "ignore_eos": True}, "return_logprob": True}

    async def ask() -> None:
        nonlocal answered
        while not stop.is_set():
            for _ in range(60):
                async with session.post(f"{plane.url}/generate", json=body) as answer:
                    if answer.status == 200:
                        sample = await answer.json()
                        assert len(sample["output_ids"]) == 40
                        answered += 1
                        await asyncio.sleep(0.4)  # leaves a core to the engine that starts
                        break
                    assert answer.status in (502, 503), await answer.text()
                await asyncio.sleep(0.1)
            else:
                failures.append("60 tries")

    async def kill_one() -> None:
        victim = plane.processes("vllm.entrypoints.openai.api_server")[0]
        for process in (*victim.children(recursive=True), victim):
            process.kill()
        while plane.routable() > 1:  # noqa: ASYNC110 - another process sets no event
            await asyncio.sleep(0.05)
        end = time.monotonic() + READY_S
        while plane.routable() < 2:
            assert time.monotonic() < end, plane.log()
            for sidecar in plane.sidecars():
                async with session.get(f"{sidecar}/health") as health:
                    assert "update them" not in await health.text(), "weights were changed before this test"
            await asyncio.sleep(0.1)
        before = answered
        while answered < before + 6:  # noqa: ASYNC110 - another process sets no event
            await asyncio.sleep(0.05)
        stop.set()

    async with asyncio.TaskGroup() as tasks:
        for _ in range(3):
            tasks.create_task(ask())
        tasks.create_task(kill_one())
    assert not failures


@pytest.mark.slow
def test_the_example_learns_from_text_rollouts(plane: RunningPlane, tmp_path: Path) -> None:
    trainer = DemoServer(tmp_path / "trainer", "--external-inference-url", plane.url)
    trainer.start()
    try:
        trainer.wait_ready(SLOW_START_S)
        command = [sys.executable, str(EXAMPLE), "--base-url", trainer.url, "--rollout-url", plane.url, "--steps", "10"]
        done = subprocess.run(
            command, env=os.environ | TRACED, capture_output=True, text=True, timeout=500, check=False
        )
    finally:
        trainer.stop()
    assert succeeded(done.returncode, done.stderr), f"{done.returncode}: {done.stderr}"
    rewards = [float(reward) for reward in re.findall(r"reward ([\d.]+)", done.stdout)]
    gaps = [float(gap) for gap in re.findall(r"gap ([-+\de.]+)", done.stdout)]
    assert len(rewards) == 10
    assert gaps[0] < 1e-4
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.05, done.stdout


async def test_requests_without_a_model_are_for_the_one_that_there_is(
    plane: RunningPlane, session: aiohttp.ClientSession
) -> None:
    """As AReaL sends completions where it has no adapter. vLLM takes them; `skyrl serve` does the same."""
    chat = {"messages": [{"role": "user", "content": "Who?"}], "max_tokens": 2}
    for path, body in (
        ("/v1/completions", {"prompt": PROMPT, "max_tokens": 2}),
        ("/v1/chat/completions", chat),
        ("/inference/v1/generate", {"token_ids": PROMPT, "sampling_params": {"max_tokens": 2}}),
    ):
        answer = await post(session, plane.url + path, body)
        assert answer["usage"]["completion_tokens"] == 2
