"""From an asample body to a job: what is filled in, folded, cut to the context, and what is refused by which field."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tinker.types import ModelInput, SampleRequest, SamplingParams

from skyrl.sampling.job import MAX_NUM_SAMPLES, MAX_SEED, MAX_STOP_STRINGS, MAX_TOPK, Limits, SampleJob, make_job
from skyrl.wire import requests
from skyrl.wire.errors import RequestError

LIMITS = Limits(vocab_size=100, max_context=20)
UNKNOWN = Limits()


def body(params: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    return {
        "sampling_session_id": "s1:sample:0",
        "prompt": {"chunks": [{"tokens": [1, 2]}, {"type": "encoded_text", "tokens": [3]}]},
        "sampling_params": params or {},
    } | changes


def job(params: dict[str, Any] | None = None, limits: Limits = LIMITS, **changes: Any) -> SampleJob:
    request = requests.decode_json(requests.SampleRequest, json.dumps(body(params, **changes)).encode())
    return make_job(request, request_id="r", session_key="k", model="m", adapter_path=None, limits=limits)


def refused(params: dict[str, Any] | None = None, limits: Limits = LIMITS, **changes: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        job(params, limits, **changes)
    assert caught.value.status == 400
    assert caught.value.field is not None
    assert caught.value.message.startswith(f"{caught.value.field}: ")
    return caught.value


def test_defaults() -> None:
    assert job() == SampleJob(
        request_id="r",
        session_key="k",
        model="m",
        adapter_path=None,
        prompt=[1, 2, 3],
        num_samples=1,
        max_tokens=17,
        temperature=1.0,
        top_p=1.0,
        top_k=-1,
        seed=None,
        stop_strings=[],
        stop_token_ids=[],
        ignore_eos=False,
        prompt_logprobs=False,
        prompt_logprobs_last_n=None,
        topk_prompt=0,
        topk_sample=0,
    )


def test_what_the_sdk_sends() -> None:
    """As its asample resource dumps it; `record_stability_info` and whatever comes next are ignored."""
    request = SampleRequest(
        prompt=ModelInput.from_ints([4, 5]),
        sampling_params=SamplingParams(max_tokens=6, seed=2**63, stop=["a"], temperature=0.5, top_k=3, top_p=0.9),
        sampling_session_id="s1:sample:0",
        seq_id=2,
        num_samples=4,
        prompt_logprobs=True,
        topk_prompt_logprobs=2,
        topk_sample_logprobs=1,
        record_stability_info=True,
    )
    sent = request.model_dump_json(exclude_none=True).encode()
    decoded = requests.decode_json(requests.SampleRequest, sent)
    made = make_job(decoded, request_id="r", session_key="k", model="m", adapter_path="/a", limits=LIMITS)
    assert (made.prompt, made.max_tokens, made.num_samples) == ([4, 5], 6, 4)
    assert (made.temperature, made.top_k, made.top_p) == (0.5, 3, 0.9)
    assert (made.stop_strings, made.prompt_logprobs, made.topk_prompt, made.topk_sample) == (["a"], True, 2, 1)
    assert decoded.seq_id == 2


@pytest.mark.parametrize(
    ("stop", "strings", "ids", "ignore_eos"),
    [
        (None, [], [], False),
        ("\n\n", ["\n\n"], [], False),
        (["a", "b"], ["a", "b"], [], False),
        ([7], [], [7], False),
        ([0, 99], [], [0, 99], False),
        ([], [], [], True),
    ],
)
def test_stop_is_dispatched_on_type(stop: Any, strings: list[str], ids: list[int], ignore_eos: bool) -> None:
    made = job({"stop": stop})
    assert (made.stop_strings, made.stop_token_ids, made.ignore_eos) == (strings, ids, ignore_eos)


@pytest.mark.parametrize("stop", [["a", 1], [1, "a"], "", [""], ["a", ""], [100], [-1], ["s"] * (MAX_STOP_STRINGS + 1)])
def test_stop_that_is_refused(stop: Any) -> None:
    assert refused({"stop": stop}).field == "sampling_params.stop"


def test_stop_ids_are_only_bounded_where_the_vocabulary_is_known() -> None:
    assert job({"stop": [100]}, UNKNOWN).stop_token_ids == [100]


@pytest.mark.parametrize("seed", [0, 1, MAX_SEED - 1, MAX_SEED, 2**63, 2**64 - 1, -1, -(2**63)])
def test_seeds_of_64_bits_fold_to_what_vllm_takes_with_every_sample_added(seed: int) -> None:
    folded = job({"seed": seed}).seed
    assert folded is not None
    assert folded >= 0
    assert folded + MAX_NUM_SAMPLES - 1 < 2**63
    assert (folded - seed) % MAX_SEED == 0
    if 0 <= seed < MAX_SEED:
        assert folded == seed


@pytest.mark.parametrize("seed", [2**64, -(2**63) - 1, 10**30])
def test_seeds_beyond_64_bits(seed: int) -> None:
    assert refused({"seed": seed}).field == "sampling_params.seed"


@pytest.mark.parametrize(
    ("max_tokens", "limits", "made"),
    [
        (None, LIMITS, 17),
        (5, LIMITS, 5),
        (17, LIMITS, 17),
        (18, LIMITS, 17),
        (10**30, LIMITS, 17),
        (None, UNKNOWN, None),
        (10_000, UNKNOWN, 10_000),
    ],
)
def test_max_tokens_fit_the_context(max_tokens: int | None, limits: Limits, made: int | None) -> None:
    assert job({"max_tokens": max_tokens}, limits).max_tokens == made


def test_prompt_must_leave_room() -> None:
    full = {"chunks": [{"tokens": [1] * 20}]}
    assert refused(prompt=full).field == "prompt"
    assert job(prompt={"chunks": [{"tokens": [1] * 19}]}).max_tokens == 1
    assert job(prompt=full, limits=UNKNOWN).prompt == [1] * 20


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        ({"chunks": []}, "prompt"),
        ({"chunks": [{"tokens": []}]}, "prompt"),
        ({"chunks": [{"tokens": [1]}, {"type": "image", "data": "aGk=", "format": "png"}]}, "prompt.chunks[1]"),
        ({"chunks": [{"location": "x", "format": "png"}]}, "prompt.chunks[0]"),
        ({"chunks": [{"dmel": "x"}]}, "prompt.chunks[0]"),
        ({"chunks": [{"tokens": [1, 100]}]}, "prompt"),
        ({"chunks": [{"tokens": [1, -1]}]}, "prompt"),
        ({"chunks": [{"tokens": [10**30]}]}, "prompt"),
    ],
)
def test_prompts_that_are_refused(prompt: Any, field: str) -> None:
    assert refused(prompt=prompt).field == field


def test_refusals_name_the_token() -> None:
    assert "token id 107 is not in [0, 100)" in refused(prompt={"chunks": [{"tokens": [1, 107, 108]}]}).message


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"temperature": -0.1}, "sampling_params.temperature"),
        ({"temperature": 2.1}, "sampling_params.temperature"),
        ({"top_p": 0.0}, "sampling_params.top_p"),
        ({"top_p": 1.1}, "sampling_params.top_p"),
        ({"top_p": -1}, "sampling_params.top_p"),
        ({"top_k": -2}, "sampling_params.top_k"),
        ({"max_tokens": 0}, "sampling_params.max_tokens"),
        ({"max_tokens": -1}, "sampling_params.max_tokens"),
    ],
)
def test_parameters_out_of_range(params: dict[str, Any], field: str) -> None:
    assert refused(params).field == field


@pytest.mark.parametrize(
    "changes",
    [
        {"num_samples": 0},
        {"num_samples": -1},
        {"num_samples": MAX_NUM_SAMPLES + 1},
        {"topk_sample_logprobs": -1},
        {"topk_sample_logprobs": MAX_TOPK + 1},
        {"topk_prompt_logprobs": -1},
        {"topk_prompt_logprobs": MAX_TOPK + 1},
        {"prompt_logprobs_last_n": 0},
        {"prompt_logprobs_last_n": -1},
        {"target_prompt_logprobs": {"data": [1], "dtype": "int64", "shape": [1, 1]}},
        {"prompt_alt_tokens_k": 1},
    ],
)
def test_options_that_are_refused(changes: dict[str, Any]) -> None:
    assert refused(**changes).field == next(iter(changes))


@pytest.mark.parametrize(
    ("params", "changes"),
    [
        ({"temperature": 0}, {}),
        ({"temperature": 2}, {}),
        ({"top_p": 1e-6}, {}),
        ({}, {"num_samples": MAX_NUM_SAMPLES}),
        ({}, {"topk_sample_logprobs": MAX_TOPK, "topk_prompt_logprobs": MAX_TOPK}),
        ({}, {"target_prompt_logprobs": None, "prompt_alt_tokens_k": 0}),
    ],
)
def test_the_ends_of_the_ranges_are_taken(params: dict[str, Any], changes: dict[str, Any]) -> None:
    job(params, **changes)


def test_top_k_zero_is_off() -> None:
    assert job({"top_k": 0}).top_k == -1


def test_prompt_logprobs_of_the_last_n() -> None:
    made = job(prompt_logprobs=True, prompt_logprobs_last_n=2)
    assert (made.prompt_logprobs, made.prompt_logprobs_last_n) == (True, 2)
    assert job(prompt_logprobs=False).prompt_logprobs is False


def test_greedy() -> None:
    assert job({"temperature": 0}).greedy
    assert not job({"temperature": 1e-6}).greedy
