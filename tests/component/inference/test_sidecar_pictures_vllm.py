"""SGLang's `image_data` through the sidecar to a real vLLM, beside transformers."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from seeing_model import END, START, Reference, make_seeing_model

from skyrl.sampling.job import SampleJob
from tests.component.inference.test_pictures_vllm import EXACT, FILES, KEY, TALL, WIDE, Served, serving, until_running
from tests.component.sidecar_world import RunningSidecar, running_sidecar
from tests.families import IMAGE_TOKEN, PICTURE_TOKENS

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="module"),
]

SAMPLING = {"max_new_tokens": 6, "ignore_eos": True, "sampling_seed": 5}


def base64_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


PNG, JPEG = f"data:image/png;base64,{base64_of(WIDE)}", base64_of(TALL)
"""As slime sends pictures, and as AReaL does."""


@dataclass
class World:
    vllm: Served
    sidecar: RunningSidecar

    async def generate(self, **body: Any) -> Any:
        defaults = {"sampling_params": SAMPLING, "return_logprob": True, "logprob_start_len": 0}
        status, answer = await self.sidecar.post("/generate", defaults | body)
        assert status == 200, answer
        return answer

    def job(self, *parts: int | bytes) -> SampleJob:
        return self.vllm.job(*parts)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    directory = tmp_path_factory.mktemp("served")
    async with (
        serving(make_seeing_model("qwen3-vl", directory, max_position_embeddings=2048), directory) as vllm,
        running_sidecar(vllm.spec.url, vllm_api_key=KEY) as sidecar,
    ):
        yield World(vllm, sidecar)


PARTS = (5, START, WIDE, END, 6, 7, START, TALL, END, 8)
SHORT = [5, START, IMAGE_TOKEN, END, 6, 7, START, IMAGE_TOKEN, END, 8]


def check(world: World, answer: dict[str, Any], parts: Sequence[int | bytes]) -> None:
    """Prompt and sample have the logprobs of transformers."""
    job, meta = world.job(*parts), answer["meta_info"]
    assert meta["prompt_tokens"] == len(job.prompt)
    triples = [*meta["input_token_logprobs"], *meta["output_token_logprobs"]]
    tokens = [*job.prompt, *answer["output_ids"]]
    assert [token for _, token, _ in triples] == tokens
    expected = Reference(world.vllm.path).logprobs(tokens, job.pictures, FILES)
    assert np.abs(np.array([value for value, _, _ in triples[1:]]) - expected).max() <= EXACT
    special = PICTURE_TOKENS.values()
    assert answer["text"].split() == [f"w{token}" for token in answer["output_ids"] if token not in special]


async def test_tokens_with_one_placeholder_or_all_of_a_pictures(world: World) -> None:
    for ids in (SHORT, [*world.job(*PARTS).prompt]):
        check(world, await world.generate(input_ids=ids, image_data=[PNG, JPEG]), PARTS)


async def test_a_text_with_a_picture(world: World) -> None:
    answer = await world.generate(text="w5 <|vision_start|> <|image_pad|> <|vision_end|> w6", image_data=PNG)
    check(world, answer, (5, START, WIDE, END, 6))


async def test_a_batch_whose_prompts_have_different_pictures(world: World) -> None:
    ids, none = [5, START, IMAGE_TOKEN, END, 6], [5, 6, 7]
    first, second, third = await world.generate(input_ids=[ids, none, ids], image_data=[PNG, None, [JPEG]])
    check(world, first, (5, START, WIDE, END, 6))
    check(world, second, (5, 6, 7))
    check(world, third, (5, START, TALL, END, 6))


async def test_several_samples_of_a_picture_and_a_stop_string(world: World) -> None:
    params = SAMPLING | {"n": 3}
    answers = await world.generate(input_ids=SHORT, image_data=[PNG, JPEG], sampling_params=params)
    assert len({tuple(answer["output_ids"]) for answer in answers}) == 3
    stop = f"w{answers[0]['output_ids'][1]}"
    (first, *_) = await world.generate(input_ids=SHORT, image_data=[PNG, JPEG], sampling_params=params | {"stop": stop})
    assert first["meta_info"]["finish_reason"]["type"] == "stop"
    assert stop not in first["text"]


async def test_a_stream_ends_as_the_whole_answer(world: World) -> None:
    body = {"input_ids": SHORT, "image_data": [PNG, JPEG], "logprob_start_len": -1}
    whole = await world.generate(**body)
    status, stream = await world.sidecar.post(
        "/generate", body | {"sampling_params": SAMPLING, "return_logprob": True, "stream": True}
    )
    assert status == 200
    last = json.loads(stream.split(b"data: ")[-2])
    for name in ("text", "output_ids"):
        assert last[name] == whole[name]
    assert last["meta_info"]["output_token_logprobs"] == whole["meta_info"]["output_token_logprobs"]


async def test_an_aborted_sample_answers_what_it_has(world: World) -> None:
    params = {"max_new_tokens": 1900, "ignore_eos": True, "n": 2}
    body = {"input_ids": SHORT, "image_data": [PNG, JPEG], "sampling_params": params, "rid": "a"}
    sampling = asyncio.create_task(world.generate(**body, logprob_start_len=-1))
    await until_running(world.vllm, 2)
    assert await world.sidecar.post("/abort_request", {"rid": "a"}) == (200, b"")
    answers = await sampling
    assert {answer["meta_info"]["finish_reason"]["type"] for answer in answers} == {"abort"}
    assert all(len(answer["output_ids"]) < 1900 for answer in answers)


async def test_the_model_is_known_to_see(world: World) -> None:
    _, info = await world.sidecar.post("/model_info")
    assert info["has_image_understanding"] is True
