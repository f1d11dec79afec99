"""Pictures in chats on the real server, and the recipes of the page about pictures."""

from __future__ import annotations

import base64
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import tinker
from openai import OpenAI
from tinker import types

from skyrl.base.pictures.picture import format_of
from skyrl.base.pictures.vision import VisionConfig
from skyrl.cli.demo.server import DemoServer
from tests.pages import blocks_of
from tests.sdk_programs import TRACED, succeeded
from tests.unit.picture_files import jpeg, png

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

KEY = "tml-chat-pictures"
MODEL = "tiny-vision"
IDS: dict[str, Any] = {"return_token_ids": True}
WIDE, TALL = png(100, 64, seed=1), jpeg("RGB", 40, 90)
SIZES = {WIDE: (100, 64), TALL: (40, 90)}
PAD = "<|image_pad|>"
"""The text of the token that stands for pictures."""


@pytest.fixture(scope="module")
def client(seeing: DemoServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{seeing.url}/v1", api_key=KEY, max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def sight(seeing: DemoServer) -> VisionConfig:
    return VisionConfig.of(str(seeing.state_dir.parent / "model"))


def part(data: bytes) -> dict[str, Any]:
    url = f"data:image/{format_of(data)};base64,{base64.b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def ask(client: OpenAI, *parts: dict[str, Any], **changes: Any) -> Any:
    messages: list[Any] = [{"role": "user", "content": [*parts]}]
    asked: dict[str, Any] = {"model": MODEL, "messages": messages, "max_tokens": 6, "temperature": 0, "extra_body": IDS}
    return client.chat.completions.create(**asked | changes)


def answer(client: OpenAI, *parts: dict[str, Any]) -> list[int]:
    return ask(client, *parts).choices[0].token_ids


def test_a_chat_about_pictures_has_their_tokens_at_their_places(client: OpenAI, sight: VisionConfig) -> None:
    answered = ask(client, text("One"), part(WIDE), text("and two"), part(TALL))
    ids = answered.prompt_token_ids
    runs = [len(run) for run in "".join("x" if token == sight.image_token_id else " " for token in ids).split()]
    assert runs == [sight.tokens(*SIZES[WIDE]), sight.tokens(*SIZES[TALL])]
    assert answered.usage.prompt_tokens == len(ids)


def test_the_answer_is_that_of_a_sample_about_the_same_picture(
    client: OpenAI, seeing: DemoServer, sight: VisionConfig
) -> None:
    answered = ask(client, text("What is this?"), part(WIDE))
    ids, count = answered.prompt_token_ids, sight.tokens(*SIZES[WIDE])
    start = ids.index(sight.image_token_id)
    chunks = [
        types.EncodedTextChunk(tokens=ids[:start]),
        types.ImageChunk(data=WIDE, format="png", expected_tokens=count),
        types.EncodedTextChunk(tokens=ids[start + count :]),
    ]
    with tinker.ServiceClient(base_url=seeing.url, api_key=KEY) as service:
        sampler = service.create_sampling_client(base_model=MODEL).result()
        params = types.SamplingParams(max_tokens=6, temperature=0)
        sampled = sampler.sample(types.ModelInput(chunks=chunks), num_samples=1, sampling_params=params).result()
        assert sampled.sequences[0].tokens == answered.choices[0].token_ids
        trainer = service.create_lora_training_client(base_model=MODEL, rank=4).result()
        path = trainer.save_weights_for_sampler(name="first").result().path
    assert ask(client, text("What is this?"), part(WIDE), model=path).choices[0].token_ids


def test_other_pictures_get_other_answers(client: OpenAI) -> None:
    """Greedy answers may be equal; their logprobs are not."""

    def first(*parts: dict[str, Any]) -> float:
        return ask(client, *parts, logprobs=True).choices[0].logprobs.content[0].logprob

    assert first(part(WIDE)) != first(part(png(100, 64, seed=2)))


def test_a_stream_about_a_picture_is_the_whole_answer_in_pieces(client: OpenAI) -> None:
    whole = ask(client, text("What?"), part(TALL)).choices[0].message.content
    stream = ask(client, text("What?"), part(TALL), stream=True)
    assert "".join(event.choices[0].delta.content or "" for event in stream) == whole


def test_a_picture_whose_request_vllm_refused_is_taken_the_next_time(client: OpenAI) -> None:
    """vLLM processes a picture before it finds that the prompt is too long."""
    picture = part(png(100, 64, seed=77))
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, text("x " * 5000), picture)
    assert refused.value.code == "context_length_exceeded"
    assert answer(client, text("What is this?"), picture)


@pytest.mark.parametrize("pictures", [0, 1])
def test_the_text_of_a_pictures_token_does_not_harm_the_server(client: OpenAI, pictures: int) -> None:
    parts = [part(WIDE)] * pictures
    before = answer(client, text("What is this?"), *parts)
    assert status_of(lambda: ask(client, text(f"What is {PAD}{PAD}?"), *parts)) in (200, 400)
    assert answer(client, text("What is this?"), *parts) == before


def test_the_id_of_a_pictures_token_in_a_completion_does_not_harm_the_server(
    client: OpenAI, sight: VisionConfig
) -> None:
    prompt = [5, *[sight.image_token_id] * 6, 7]
    assert status_of(lambda: client.completions.create(model=MODEL, prompt=prompt, max_tokens=2)) in (200, 400)
    assert answer(client, text("What is this?"), part(WIDE))


def status_of(call: Callable[[], Any]) -> int:
    try:
        call()
    except openai.APIStatusError as error:
        return error.status_code
    return 200


def test_a_wrong_picture_is_a_400_that_names_it(client: OpenAI) -> None:
    bad = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, text("What?"), part(WIDE), bad)
    assert refused.value.param == "messages[0].content[2].image_url"


PAGE = "docs/howto/pictures.md"


def test_the_classifier_and_the_reinforcement_learning_of_the_page_learn(seeing: DemoServer, tmp_path: Path) -> None:
    program = "\n\n".join(block.text for block in blocks_of(PAGE) if block.language == "python")
    model = seeing.state_dir.parent / "model"
    program = program.replace("http://127.0.0.1:8000", seeing.url).replace("./tiny-vision", str(model))
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=os.environ | TRACED,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert succeeded(done.returncode, done.stderr), f"{done.returncode}: {done.stderr}"
    accuracy = re.findall(r"^accuracy ([\d.]+)$", done.stdout, re.M)
    assert float(accuracy[0]) > 0.8
    steps = [line.split() for line in done.stdout.splitlines() if line.count(" ") == 2]
    rewards = [float(reward) for _, reward, _ in steps]
    assert len(rewards) == 24
    assert sum(rewards[-4:]) / 4 > sum(rewards[:4]) / 4 + 0.2
    assert all(abs(float(gap)) < 1e-4 for _, _, gap in steps)
    assert float(done.stdout.splitlines()[-1]) < 1e-4
