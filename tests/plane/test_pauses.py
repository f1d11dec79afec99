"""Pauses, memory and adapters on real vLLMs, and which of vLLM's own routes need the admin key.

tests/component/inference/test_sidecar_pause.py has their order and what fails.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from skyrl.base.tiny import model_path
from skyrl.inference.sidecar.app import needs_admin
from skyrl.inference.sidecar.control import VLLM_UPDATES
from tests.plane.running import RunningPlane
from tests.plane.workers import BEGUN_S, ENDLESS, Worker, all_computed, all_paused, computed

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

PROMPT = [265, 296, 83, 315]
TOKENS = 250
ROUNDS, IN_FLIGHT = 8, 16
ROUNDING = 1e-4
"""Float32 sums in another order: batches differ, and a retracted cache is computed in one pass."""

OPEN = {
    *("/detokenize", "/generative_scoring", "/get_world_size", "/health", "/inference/v1/generate", "/invocations"),
    *("/is_paused", "/is_sleeping", "/load", "/metrics", "/ping", "/tokenize", "/version", "/weight_info"),
    *("/v1/chat/completions", "/v1/chat/completions/batch", "/v1/chat/completions/derender"),
    *("/v1/chat/completions/render", "/v1/completions", "/v1/completions/derender", "/v1/completions/render"),
    *("/v1/messages", "/v1/messages/count_tokens", "/v1/messages/render", "/v1/models", "/v1/responses"),
    *("/v1/responses/render", "/v1/responses/{response_id}", "/v1/responses/{response_id}/cancel", "/v1/systemone"),
}
"""vLLM's routes that pass through without the admin key. All others need it."""


async def streamed(worker: Worker, tokens: list[int], new_tokens: int) -> dict[str, Any]:
    """The last chunk of a stream."""
    sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
    body = {"input_ids": tokens, "sampling_params": sampling, "return_logprob": True, "stream": True}
    async with worker.session.post(f"{worker.url}/generate", json=body) as answer:
        assert answer.status == 200
        *_, last, done, end = (await answer.text()).split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return json.loads(last.removeprefix("data: "))


def found(sample: dict[str, Any]) -> tuple[list[int], list[float]]:
    return sample["output_ids"], [triple[0] for triple in sample["meta_info"]["output_token_logprobs"]]


async def loads(worker: Worker) -> tuple[int, int]:
    """Running and waiting."""
    _, answer = await worker.post("/v1/loads")
    return answer["loads"][0]["num_running_reqs"], answer["loads"][0]["num_waiting_reqs"]


async def until_loads(worker: Worker, running: int, waiting: int) -> None:
    async with asyncio.timeout(BEGUN_S):
        while await loads(worker) != (running, waiting):  # noqa: ASYNC110 - another process sets no event
            await asyncio.sleep(0.01)


async def test_frozen_requests_go_on_with_the_same_tokens(workers: list[Worker]) -> None:
    """As if nothing had happened, plain and streamed."""
    worker = workers[0]
    wanted = await asyncio.gather(*(worker.sample([*PROMPT, number], TOKENS) for number in range(4)))

    def begin() -> list[asyncio.Task[Any]]:
        kinds = (Worker.sample, Worker.sample, streamed, streamed)
        return [asyncio.create_task(ask(worker, [*PROMPT, number], TOKENS)) for number, ask in enumerate(kinds)]

    running = await all_paused([worker], begin, "in_place")
    late = asyncio.create_task(worker.sample(PROMPT, 3))
    await until_loads(worker, 4, 1)
    assert (await worker.get("/flush_cache"))[0] == 400
    assert (await worker.get("/health_generate"))[0] == 200
    assert not any(task.done() for task in [*running, late])
    await worker.done("/continue_generation")
    for task, undisturbed in zip(running, wanted, strict=True):
        sample = await task
        assert sample["meta_info"]["finish_reason"] == {"type": "length", "length": TOKENS}
        assert sample["output_ids"] == undisturbed["output_ids"]
        assert found(sample)[1] == pytest.approx(found(undisturbed)[1], abs=ROUNDING)
        assert sample["meta_info"]["weight_versions"] == [{"version": "default", "start": 0, "end": TOKENS}]
    assert len((await late)["output_ids"]) == 3


async def test_retracted_requests_lose_their_cache_and_no_token(workers: list[Worker]) -> None:
    worker, prompt = workers[0], [*PROMPT, 9]  # no two tokens are almost equally likely after it
    wanted = await worker.sample(prompt, TOKENS)

    def begin() -> list[asyncio.Task[Any]]:
        return [asyncio.create_task(ask(worker, prompt, TOKENS)) for ask in (Worker.sample, streamed)]

    running = await all_paused([worker], begin, "retract")
    for _ in range(2):
        assert (await worker.get("/flush_cache"))[0] == 200
    assert await loads(worker) == (2, 0)
    await worker.done("/continue_generation")
    for sample in await asyncio.gather(*running):
        assert sample["output_ids"] == wanted["output_ids"]
        assert found(sample)[1] == pytest.approx(found(wanted)[1], abs=ROUNDING)


@pytest.mark.parametrize("frozen_before", [False, True])
async def test_aborted_requests_are_answered_and_new_ones_wait(workers: list[Worker], frozen_before: bool) -> None:
    worker = workers[0]
    body = {"prompt": PROMPT, "max_tokens": ENDLESS, "ignore_eos": True}

    def begin() -> list[asyncio.Task[Any]]:
        own = [asyncio.create_task(ask(worker, PROMPT, ENDLESS)) for ask in (Worker.sample, streamed)]
        return [*own, asyncio.create_task(worker.post("/v1/completions", body))]

    if frozen_before:
        *running, passing = await all_paused([worker], begin, "in_place")
    else:
        *running, passing = await all_computed([worker], begin)
    await worker.done("/pause_generation")
    for sample in await asyncio.gather(*running):
        assert sample["meta_info"]["finish_reason"]["type"] == "abort"
        assert len(found(sample)[0]) == len(found(sample)[1]) < ENDLESS
    assert (await passing)[1]["choices"][0]["finish_reason"] == "abort"
    late = asyncio.create_task(worker.sample(PROMPT, 3))
    await until_loads(worker, 0, 1)
    assert (await worker.get("/flush_cache"))[0] == 200
    assert not late.done()
    await worker.done("/continue_generation")
    assert len((await late)["output_ids"]) == 3


async def test_frozen_requests_can_be_aborted_and_left(workers: list[Worker]) -> None:
    worker = workers[0]

    def begin() -> list[asyncio.Task[Any]]:
        return [asyncio.create_task(worker.sample(PROMPT, 500, rid=rid)) for rid in ("mine", "other", "left")]

    mine, other, left = await all_paused([worker], begin, "in_place")
    await worker.session.post(f"{worker.url}/abort_request", json={"rid": "mine"})
    assert (await mine)["meta_info"]["finish_reason"]["type"] == "abort"
    left.cancel()
    await until_loads(worker, 1, 0)
    await worker.done("/continue_generation")
    assert len((await other)["output_ids"]) == 500


async def test_pauses_lose_nothing(workers: list[Worker]) -> None:
    worker = workers[0]
    prompts = [[*PROMPT, number] for number in range(IN_FLIGHT)]
    wanted = await asyncio.gather(*(worker.sample(prompt, TOKENS) for prompt in prompts))

    def begin() -> list[asyncio.Task[Any]]:
        return [
            asyncio.create_task((Worker.sample, streamed)[n % 2](worker, prompts[n], TOKENS)) for n in range(IN_FLIGHT)
        ]

    pauses, frozen = 0, {"in_place": 0, "retract": 0}
    while pauses < ROUNDS or min(frozen.values()) < 2:  # on a busy machine the samples end before the last pause
        mode = ("in_place", "retract")[pauses % 2]
        running = await all_paused([worker], begin, mode)
        while not all(task.done() for task in running):
            pauses += 1
            frozen[mode] += await worker.running() > 0
            await worker.done("/continue_generation")
            mode = ("in_place", "retract")[pauses % 2]
            await worker.done("/pause_generation", {"mode": mode})
        await worker.done("/continue_generation")
        assert [sample["output_ids"] for sample in await asyncio.gather(*running)] == [
            one["output_ids"] for one in wanted
        ]
        assert await loads(worker) == (0, 0)


async def test_requests_wait_while_memory_is_released(workers: list[Worker]) -> None:
    """On a CPU nothing is freed."""
    worker = workers[0]
    wanted = await worker.sample(PROMPT, 20)
    [running] = await computed([worker], 1, lambda worker: worker.sample(PROMPT, ENDLESS, rid="endless"))
    assert "1 requests are in flight" in await worker.refused("/release_memory_occupation")
    await worker.session.post(f"{worker.url}/abort_request", json={"rid": "endless"})
    assert (await running)["meta_info"]["finish_reason"]["type"] == "abort"
    assert await worker.post("/release_memory_occupation") == (200, None)
    late = asyncio.create_task(worker.sample(PROMPT, 20))
    await until_loads(worker, 0, 1)
    await worker.done("/continue_generation")
    assert "/resume_memory_occupation" in await worker.refused("/weights_checker")
    assert await worker.post("/resume_memory_occupation", {"tags": ["weights"]}) == (200, None)
    assert len((await worker.done("/weights_checker"))["payload"]) == 1
    assert not late.done()
    assert await worker.post("/resume_memory_occupation", {"tags": ["kv_cache"]}) == (200, None)
    assert (await late)["output_ids"] == wanted["output_ids"]
    for tag in ("weights", "kv_cache"):
        assert await worker.post("/release_memory_occupation", {"tags": [tag]}) == (200, None)
        late = asyncio.create_task(worker.sample(PROMPT, 20))
        await until_loads(worker, 0, 1)
        assert await worker.post("/resume_memory_occupation", {"tags": [tag]}) == (200, None)
        assert (await late)["output_ids"] == wanted["output_ids"]


def random_adapter(directory: Path) -> Path:
    """On one projection of the tiny model."""
    config = json.loads((model_path() / "config.json").read_text())
    width_in, width_out = config["hidden_size"], config["num_attention_heads"] * config["head_dim"]
    tensors = {
        f"base_model.model.model.layers.0.self_attn.q_proj.lora_{part}.weight": torch.randn(shape)
        for part, shape in (("A", (4, width_in)), ("B", (width_out, 4)))
    }
    save_file(tensors, directory / "adapter_model.safetensors")
    peft = {"peft_type": "LORA", "r": 4, "lora_alpha": 16, "target_modules": ["q_proj"], "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(peft))
    return directory


async def test_adapters_come_and_go(workers: list[Worker], tmp_path: Path) -> None:
    worker, path = workers[0], str(random_adapter(tmp_path))
    base = await worker.sample(PROMPT, 8)
    loaded = await worker.done("/load_lora_adapter", {"lora_name": "a-v1", "lora_path": path, "pinned": True})
    assert loaded == {"success": True, "error_message": "", "loaded_adapters": {"a-v1": path}}
    assert found(await worker.sample(PROMPT, 8, lora_path="a-v1"))[1] != found(base)[1]
    for body in ({"lora_name": "a-v1", "lora_path": path}, {"lora_name": "b", "lora_path": "/nowhere"}):
        status, answer = await worker.post("/load_lora_adapter", body)
        assert (status, answer["success"], answer["loaded_adapters"]) == (400, False, {"a-v1": path})
        assert answer["error_message"]
    gone = {"success": True, "error_message": "", "loaded_adapters": {}}
    assert await worker.done("/unload_lora_adapter", {"lora_name": "a-v1"}) == gone
    status, answer = await worker.post("/unload_lora_adapter", {"lora_name": "a-v1"})
    assert (status, answer["success"], answer["loaded_adapters"]) == (400, False, {})
    assert (await worker.post("/generate", {"input_ids": PROMPT, "lora_path": "a-v1"}))[0] == 400


async def test_which_of_vllms_routes_need_the_admin_key(workers: list[Worker]) -> None:
    """A new version of vLLM may have new routes: look at each before it is open."""
    _, text = await workers[0].get("/openapi.json")
    paths = json.loads(text)["paths"]
    closed = {path for path in paths if needs_admin(path, {"/health", "/metrics"})}
    assert closed >= {"/pause", "/resume", "/sleep", "/collective_rpc", "/update_weights", "/weight_checker"}
    assert paths.keys() - closed == OPEN
    known = {"/update_weight_version", "/weight_checker", "/weight_info"}
    assert {path for path in paths if "weight" in path} - known == VLLM_UPDATES


async def test_vllms_own_weight_transfer_is_refused_by_workers_and_through_the_router(
    plane: RunningPlane, workers: list[Worker]
) -> None:
    for worker in (workers[0], Worker(plane.url, workers[0].session)):
        for path in VLLM_UPDATES:
            status, answer = await worker.post(path, {})
            assert status == 501
            assert "/update_weights_from_disk" in answer["error"]["message"]
