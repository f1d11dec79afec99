"""Routed experts from one real vLLM on a CPU through the sidecar, against the routers of transformers.

The cache of this vLLM is small, and it splits prompts: so requests are preempted, and prompts are computed in parts.
"""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM

from skyrl.base.config.loading import load_config
from skyrl.base.tiny import model_path, moe
from skyrl.inference.placement import LocalPlacement
from skyrl.inference.vllm_command import vllm_spec
from skyrl.rollout import RolloutClient, RolloutConfig, RolloutRequest, SamplingParams
from skyrl.runtime.processes.ports import free_port
from tests.component.router_world import running_router
from tests.component.sidecar_world import RunningSidecar, running_sidecar
from tests.own_experts import own_experts

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]

KEY = "test-key"
BLOCK, BLOCKS = 32, 16
LAYERS = 3
PREEMPTIONS, GENERATED = "vllm:num_preemptions_total{", "vllm:generation_tokens_total{"


class Served(RunningSidecar):
    """The sidecar, and its model in transformers, in float32 as vLLM's on a CPU."""

    model: Any

    async def sampled(self, prompt: list[int], count: int, **body: Any) -> Any:
        params = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
        fields = {"input_ids": prompt, "sampling_params": params, "return_routed_experts": True}
        status, answer = await self.generate(**fields | body)
        assert status == 200, answer
        return answer

    async def metric(self, name: str) -> float:
        async with self.session.get(f"{self.url}/metrics") as answer:
            text = await answer.text()
        return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    directory = tmp_path_factory.mktemp("mixture")
    moe.make(directory)
    path = str(directory)
    vllm = {
        "enable_return_routed_experts": True,
        "enable_lora": False,
        "block_size": BLOCK,
        "num_gpu_blocks_override": BLOCKS,
        "enable_chunked_prefill": True,
        "max_num_batched_tokens": 48,
    }
    inference = {"max_model_len": 256, "max_num_seqs": 8, "engine_init_kwargs": vllm}
    settings = {f"generator.inference_engine.{name}": value for name, value in inference.items()}
    spec = vllm_spec(load_config({"base_model": path, "backend_config": settings}), free_port(), KEY, cuda=False)
    handle = LocalPlacement(tmp_path_factory.mktemp("logs")).run(spec, [])
    try:
        async with running_sidecar(spec.url, vllm_api_key=KEY) as sidecar:
            end = time.monotonic() + 400
            while (await sidecar.post("/health_generate"))[0] != 200:
                assert time.monotonic() < end, handle.log_tail(60)
                await asyncio.sleep(0.1)
            served = Served(sidecar.app, sidecar.url, sidecar.session)
            served.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
            yield served
    finally:
        await handle.stop()


def prompt_of(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 400, length).tolist()


def chosen_experts(model: Any, tokens: list[int]) -> npt.NDArray[np.int64]:
    """The experts that transformers' routers choose for these tokens: int64 [tokens, layers, k], ascending."""
    return np.sort(own_experts(model, torch.tensor(tokens)).numpy(), axis=2)


def rows_of(answer: Any) -> npt.NDArray[np.int32]:
    """int32 [rows, layers, k], ascending."""
    flat = np.frombuffer(base64.b64decode(answer["meta_info"]["routed_experts"]), "<i4")
    return np.sort(flat.reshape(-1, LAYERS, moe.EXPERTS_PER_TOKEN), axis=2)


def check(served: Served, prompt: list[int], answer: Any, start: int = 0) -> None:
    tokens = [*prompt, *answer["output_ids"]]
    np.testing.assert_array_equal(rows_of(answer), chosen_experts(served.model, tokens)[start:-1])


async def test_the_server_says_that_it_returns_experts(served: Served) -> None:
    async with served.session.get(f"{served.url}/server_info") as answer:
        assert (await answer.json())["enable_return_routed_experts"] is True


async def test_a_prompt_in_parts_and_its_sampled_tokens(served: Served) -> None:
    prompt = prompt_of(1, 100)
    answer = await served.sampled(prompt, 20)
    assert len(answer["output_ids"]) == 20
    check(served, prompt, answer)


async def test_rows_of_cached_blocks_come_from_the_request_that_computed_them(served: Served) -> None:
    prompt = prompt_of(2, 90)
    first = await served.sampled(prompt, 10)
    longer = [*prompt, *first["output_ids"], *prompt_of(3, 9)]
    again = await served.sampled(longer, 5)
    assert again["meta_info"]["cached_tokens"] >= 2 * BLOCK
    check(served, longer, again)
    np.testing.assert_array_equal(rows_of(again)[:99], rows_of(first))


async def test_requests_together_are_preempted_and_keep_their_own_rows(served: Served) -> None:
    before = await served.metric(PREEMPTIONS)
    shared = prompt_of(4, 40)
    prompts = [[*shared, *prompt_of(10 + number, 20 + 3 * number)] for number in range(8)]
    answers = await asyncio.gather(*(served.sampled(prompt, 60) for prompt in prompts))
    assert await served.metric(PREEMPTIONS) > before
    for prompt, answer in zip(prompts, answers, strict=True):
        check(served, prompt, answer)


async def test_a_later_start_leaves_rows_out(served: Served) -> None:
    prompt = prompt_of(5, 70)
    check(served, prompt, await served.sampled(prompt, 4, routed_experts_start_len=70), start=70)
    check(served, prompt, await served.sampled(prompt, 4, routed_experts_start_len=33), start=33)


async def test_an_aborted_sample_has_its_rows_and_its_continuation_has_all(served: Served) -> None:
    prompt = prompt_of(6, 50)
    before = await served.metric(GENERATED)
    sample = asyncio.create_task(served.sampled(prompt, 200))
    while True:
        if await served.metric(GENERATED) > before:
            break
        await asyncio.sleep(0.01)
    await served.post("/abort_request", {"abort_all": True})
    aborted = await sample
    assert aborted["meta_info"]["finish_reason"]["type"] == "abort"
    done = aborted["output_ids"]
    assert 0 < len(done) < 200
    check(served, prompt, aborted)
    longer = [*prompt, *done]
    check(served, longer, await served.sampled(longer, 8))


class WorkerOf:
    """A running sidecar as a worker of the router."""

    def __init__(self, sidecar: RunningSidecar) -> None:
        self.url = sidecar.url

    async def start(self) -> None: ...

    async def stop(self) -> None: ...


async def test_a_rollout_client_gets_them_through_router_and_radix_cache(served: Served) -> None:
    """Each turn's rows cover the whole trajectory: nothing has to be put together."""
    params = SamplingParams(max_new_tokens=12, temperature=0.0, ignore_eos=True)
    worker: Any = WorkerOf(served)
    async with running_router(worker, middleware=("radix",), tokenizer=model_path()) as router:
        host, _, port = router.url.removeprefix("http://").partition(":")
        config = RolloutConfig(rollout_router_ip=host, rollout_router_port=int(port))
        async with RolloutClient(config) as client:
            text = "The sum of 2 and 3 is "
            for _ in range(3):
                prompt = (await client.retrieve(text)).tokens
                answer = await client.generate(RolloutRequest(text=text, params=params, return_routed_experts=True))
                flat = np.frombuffer(base64.b64decode(answer.routed_experts), "<i4")
                rows = np.sort(flat.reshape(-1, LAYERS, moe.EXPERTS_PER_TOKEN), axis=2)
                tokens = [*prompt, *answer.tokens]
                np.testing.assert_array_equal(rows, chosen_experts(served.model, tokens)[:-1])
                text += answer.text + "\nAnd then?\n"


async def test_requests_that_ask_for_no_experts_get_none(served: Served) -> None:
    answer = await served.sampled(prompt_of(7, 10), 3, return_routed_experts=False)
    assert "routed_experts" not in answer["meta_info"]
