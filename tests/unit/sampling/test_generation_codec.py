"""The request that a sample job with pictures sends to vLLM, and the result made of vLLM's answer."""

from __future__ import annotations

import base64
import json
from typing import Any

import msgspec
import numpy as np
import pytest
from tinker import SampleResponse
from tinker.proto.response_conv import deserialize_sample_response

from skyrl.base.pictures.picture import PlacedPicture, digest_of
from skyrl.base.types.weights import AdapterVersion
from skyrl.base.wire.sample_request import Distribution
from skyrl.base.wire.tensors import WireTensor
from skyrl.inference.vllm_plugin.protocol import PromptScores
from skyrl.sampling.completion import (
    LARGE_BYTES,
    AbortedAnswer,
    MalformedAnswer,
    MissingLogprobs,
    OtherTokens,
    decode_answer,
)
from skyrl.sampling.job import PackedPrompt, Pictures, SampleJob
from skyrl.sampling.pictures import PIECE_BYTES, encode_request, one_for_each
from tests import sample_jobs

IMAGE = 99
PNG, JPEG = b"first file", bytes(range(256)) * 1024
FILES = {digest_of(PNG): PNG, digest_of(JPEG): JPEG}
FIRST, SECOND = PlacedPicture(1, 3, digest_of(PNG), "png"), PlacedPicture(5, 2, digest_of(JPEG), "jpeg")
PROMPT = [5, IMAGE, IMAGE, IMAGE, 6, IMAGE, IMAGE, 7]
JOB = msgspec.structs.replace(
    sample_jobs.JOB,
    model="m1@2",
    weights=AdapterVersion("m1@2"),
    prompt=PROMPT,
    pictures=Pictures("tenant", IMAGE, (FIRST, SECOND)),
)


def job(**changes: Any) -> SampleJob:
    return msgspec.structs.replace(JOB, **changes)


def request_of(priority: int | None = None, **changes: Any) -> dict[str, Any]:
    start, rest = encode_request(job(**changes), priority, FILES)
    pieces = list(rest.pieces)
    assert sum(map(len, pieces)) == rest.size
    return json.loads(start + b"".join(pieces))


def sampled(token: int, logprob: float, *best: tuple[int, float]) -> dict[str, Any]:
    cells = [(token, logprob), *best]
    tops = [{"token_id": one, "logprob": value, "rank": 1} for one, value in cells]
    return {"token_id": token, "logprob": logprob, "rank": 1, "top_logprobs": tops}


def choice(*content: dict[str, Any], **more: Any) -> dict[str, Any]:
    tokens = [cell["token_id"] for cell in content]
    return {"index": 0, "finish_reason": "stop", "token_ids": tokens, "logprobs": {"content": list(content)}} | more


def answer(*choices: dict[str, Any], **more: Any) -> bytes:
    found = {"image": [{"offset": 1, "length": 3}, {"offset": 5, "length": 2}]}
    return json.dumps({"choices": choices, "prompt_token_ids": PROMPT, "mm_placeholders": found} | more).encode()


def read(body: bytes, job: SampleJob = JOB, **options: Any) -> SampleResponse:
    """The result as the SDK reads it."""
    return deserialize_sample_response(decode_answer(body, job, **options).body)


ONE = choice(sampled(4, -0.5))


def test_each_picture_is_one_token_of_the_request_and_goes_with_it_as_data() -> None:
    urls = {"png": base64.b64encode(PNG).decode(), "jpeg": base64.b64encode(JPEG).decode()}
    parts = [
        {"type": "image_url", "uuid": digest, "url": f"data:image/{form};base64,{urls[form]}"}
        for digest, form in ((FIRST.digest, "png"), (SECOND.digest, "jpeg"))
    ]
    params = {"n": 1, "max_tokens": 3, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "logprobs": 0}
    assert request_of() == {
        "model": "m1@2",
        "token_ids": [5, IMAGE, 6, IMAGE, 7],
        "sampling_params": params | {"detokenize": False},
        "return_token_ids": True,
        "stream": False,
        "content_parts": parts,
    }
    assert request_of(7)["priority"] == 7
    assert len(JPEG) > PIECE_BYTES


@pytest.mark.parametrize(
    ("changes", "adds"),
    [
        ({"seed": 0}, {"seed": 0}),
        ({"stop_token_ids": [3, 0]}, {"stop_token_ids": [3, 0]}),
        ({"ignore_eos": True}, {"ignore_eos": True}),
        ({"num_samples": 3}, {"n": 3}),
        ({"num_samples": 3, "distribution": Distribution(temperature=0.0)}, {"temperature": 0.0}),
        ({"prompt_logprobs": True}, {"prompt_logprobs": 0}),
        ({"topk_prompt": 4}, {"prompt_logprobs": 4}),
        ({"topk_sample": 4}, {"logprobs": 5}),
        ({"distribution": Distribution(0.5, 7, 0.9)}, {"temperature": 0.5, "top_p": 0.9, "top_k": 7}),
    ],
)
def test_a_jobs_options_become_sampling_parameters(changes: dict[str, Any], adds: dict[str, Any]) -> None:
    assert request_of(**changes)["sampling_params"] == request_of()["sampling_params"] | adds


def test_vllm_makes_text_only_where_it_must_look_for_stop_strings() -> None:
    params = request_of(stop_strings=["a"])["sampling_params"]
    assert (params["stop"], params["skip_special_tokens"]) == (["a"], False)
    assert "detokenize" not in params


def test_the_plugins_scores_are_asked_for_in_extra_args() -> None:
    target = WireTensor(np.asarray([4, -1, 9, 4, -1, -1, -1]), (7, 1))
    params = request_of(target=target, alternatives=2)["sampling_params"]
    assert params["prompt_logprobs"] == 0
    arrived = PromptScores.from_extra_args(params["extra_args"], len(PROMPT), 500)
    assert arrived is not None
    assert (arrived.rows.tolist(), arrived.ids.tolist(), arrived.draws) == ([0, 2, 3], [4, 9, 4], 2)


@pytest.mark.parametrize(
    ("prompt", "placed", "short"),
    [
        ([IMAGE] * 5, [(0, 5)], [IMAGE]),
        ([IMAGE] * 5, [(0, 2), (2, 3)], [IMAGE] * 2),
        ([1, IMAGE], [(1, 1)], [1, IMAGE]),
        ([IMAGE, IMAGE, 1], [(0, 2)], [IMAGE, 1]),
    ],
    ids=["alone", "side by side", "last", "first"],
)
def test_pictures_may_be_anywhere(prompt: list[int], placed: list[tuple[int, int]], short: list[int]) -> None:
    pictures = tuple(PlacedPicture(start, tokens, "d", "png") for start, tokens in placed)
    assert one_for_each(PackedPrompt(prompt)[:], Pictures("tenant", IMAGE, pictures)) == short


def test_sequences_come_in_the_order_of_their_index_with_their_counts() -> None:
    usage = {"prompt_tokens_details": {"cached_tokens": 2}}
    second = choice(sampled(1, -1.0), sampled(2, -2.0), index=1, finish_reason="length")
    counted = decode_answer(answer(second, ONE, usage=usage), job(num_samples=2))
    assert (counted.prompt_tokens, counted.cached_tokens, counted.sampled_tokens) == (8, 2, 3)
    result = deserialize_sample_response(counted.body)
    assert [(s.stop_reason, s.tokens, s.logprobs) for s in result.sequences] == [
        ("stop", [4], [-0.5]),
        ("length", [1, 2], [-1.0, -2.0]),
    ]
    assert result.prompt_cache_hit_tokens == 2


def test_a_large_answer_is_read_as_a_small_one() -> None:
    content = [sampled(token, -0.5) for token in range(4000)]
    body = answer(choice(*content), choice(*content, index=1))
    assert len(body) > LARGE_BYTES
    assert [s.tokens for s in read(body, job(num_samples=2)).sequences] == [list(range(4000))] * 2


def test_best_tokens_are_sorted_and_cut_without_impossible_ones() -> None:
    content = [sampled(4, -9.0, (7, -0.25), (8, -0.5)), sampled(5, -1.0, (6, -9999.0))]
    (sequence,) = read(answer(choice(*content)), job(topk_sample=2)).sequences
    assert sequence.topk_logprobs == [[(7, -0.25), (8, -0.5)], [(5, -1.0)]]


def test_rows_of_the_prompt_count_each_token_of_a_picture() -> None:
    rows = [None, *({str(token): {"logprob": -1.0 - at}} for at, token in enumerate(PROMPT[1:]))]
    body = answer(choice(sampled(1, -1.0)), choice(sampled(2, -1.0), index=1), prompt_logprobs=rows)
    result = read(body, job(num_samples=2, prompt_logprobs=True, topk_prompt=1))
    assert result.prompt_logprobs == [None, -1.0, -2.0, -3.0, -4.0, -5.0, -6.0, -7.0]
    assert result.topk_prompt_logprobs is not None
    assert result.topk_prompt_logprobs[2] == [(IMAGE, -2.0)]


def test_another_number_of_tokens_of_a_picture_is_an_error_with_both_numbers() -> None:
    found = {"image": [{"offset": 1, "length": 3}, {"offset": 5, "length": 4}]}
    more = {"prompt_token_ids": [*PROMPT[:5], *[IMAGE] * 4, 7], "mm_placeholders": found}
    with pytest.raises(OtherTokens, match="made 4 tokens of image 2 of the prompt, and this server counted 2"):
        decode_answer(answer(ONE, **more), JOB)


@pytest.mark.parametrize("tokens", [None, PROMPT[:-1], [*PROMPT[:-1], 8]], ids=["none", "fewer", "others"])
def test_another_prompt_is_an_error(tokens: list[int] | None) -> None:
    with pytest.raises(OtherTokens, match=f"a prompt of {len(tokens or [])} tokens, and the request has 8"):
        decode_answer(answer(ONE, prompt_token_ids=tokens), JOB)


@pytest.mark.parametrize("reason", ["abort", "error", None])
def test_an_aborted_answer_is_an_abort_also_without_its_prompt(reason: str | None) -> None:
    with pytest.raises(AbortedAnswer):
        decode_answer(answer(ONE | {"finish_reason": reason}, prompt_token_ids=None), JOB)


@pytest.mark.parametrize("logprobs", [None, {}, {"content": None}, {"content": [{"token_id": 4, "logprob": None}]}])
def test_missing_logprobs_raise_or_become_zeros(logprobs: Any) -> None:
    body = answer(ONE | {"logprobs": logprobs})
    with pytest.raises(MissingLogprobs):
        decode_answer(body, JOB)
    assert read(body, zero_fill=True).sequences[0].logprobs == [0.0]


def test_a_body_that_is_no_generation_is_called_so() -> None:
    with pytest.raises(MalformedAnswer, match="not a generation"):
        decode_answer(b"<html>", JOB)


def test_the_versions_that_sampled_are_told() -> None:
    spans = [{"version": "v1", "start": 0, "end": 1}, {"version": "v2", "start": 1, "end": 2}]
    body = answer(choice(sampled(1, -1.0), sampled(2, -2.0), weight_versions=spans))
    assert decode_answer(body, job(version="v1")).changed_weights
