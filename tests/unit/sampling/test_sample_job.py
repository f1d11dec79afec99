"""The job that an asample body becomes: defaults, folded seeds, limits of the context, and the field of each
refusal."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from msgspec.structs import replace
from tinker.types import ModelInput, SampleRequest, SamplingParams

from skyrl.base.types.context_limits import ContextLimits
from skyrl.base.types.weights import AdapterVersion, BaseWeights
from skyrl.base.wire import sample_request
from skyrl.base.wire.decoding import decode_json
from skyrl.base.wire.errors import RequestError
from skyrl.base.wire.sample_request import Distribution
from skyrl.sampling.job import MAX_NUM_SAMPLES, MAX_SEED, MAX_STOP_STRINGS, MAX_TOPK, SampleJob, make_job
from tests.sample_jobs import JOB

LIMITS = ContextLimits(vocab_size=100, max_context=20)
UNKNOWN = ContextLimits()


def body(params: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    return {
        "sampling_session_id": "s1:sample:0",
        "prompt": {"chunks": [{"tokens": [1, 2]}, {"type": "encoded_text", "tokens": [3]}]},
        "sampling_params": params or {},
    } | changes


def job(params: dict[str, Any] | None = None, limits: ContextLimits = LIMITS, **changes: Any) -> SampleJob:
    sent = json.dumps(body(params, **changes)).encode()
    request = sample_request.decode_sample_request(sent, limits.vocab_size)
    return make_job(request, request_id="r", session_key="k", model="m", weights=BaseWeights(), limits=limits)


def refused(params: dict[str, Any] | None = None, limits: ContextLimits = LIMITS, **changes: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        job(params, limits, **changes)
    assert caught.value.status == 400
    assert caught.value.field is not None
    assert caught.value.message.startswith(f"{caught.value.field}: ")
    return caught.value


def test_a_job_has_these_defaults() -> None:
    own = {"request_id": "r", "session_key": "k", "model": "m"}
    assert job() == replace(JOB, **own, prompt=[1, 2, 3], max_tokens=17)


def test_the_sdks_request_becomes_a_job() -> None:
    """The body is dumped as the SDK's asample resource does it. `record_stability_info` and other unknown fields are
    ignored."""
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
    decoded = decode_json(sample_request.SampleRequest, sent)
    sample_job = make_job(
        decoded, request_id="r", session_key="k", model="m", weights=AdapterVersion("m@1"), limits=LIMITS
    )
    assert (sample_job.prompt, sample_job.max_tokens, sample_job.num_samples) == ([4, 5], 6, 4)
    assert sample_job.distribution == Distribution(temperature=0.5, top_k=3, top_p=0.9)
    assert (sample_job.stop_strings, sample_job.prompt_logprobs) == (["a"], True)
    assert (sample_job.topk_prompt, sample_job.topk_sample) == (2, 1)
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
def test_the_type_of_stop_decides_between_strings_ids_and_none(
    stop: Any, strings: list[str], ids: list[int], ignore_eos: bool
) -> None:
    sample_job = job({"stop": stop})
    assert (sample_job.stop_strings, sample_job.stop_token_ids, sample_job.ignore_eos) == (strings, ids, ignore_eos)


@pytest.mark.parametrize("stop", [["a", 1], [1, "a"], "", [""], ["a", ""], [100], [-1], ["s"] * (MAX_STOP_STRINGS + 1)])
def test_an_invalid_stop_is_refused(stop: Any) -> None:
    assert refused({"stop": stop}).field == "sampling_params.stop"


def test_stop_ids_are_bounded_only_if_the_vocabulary_is_known() -> None:
    assert job({"stop": [100]}, UNKNOWN).stop_token_ids == [100]


@pytest.mark.parametrize("seed", [0, 1, MAX_SEED - 1, MAX_SEED, 2**63, 2**64 - 1, -1, -(2**63)])
def test_seeds_of_64_bits_are_folded_so_that_seed_plus_sample_fits_vllm(seed: int) -> None:
    folded = job({"seed": seed}).seed
    assert folded is not None
    assert folded >= 0
    assert folded + MAX_NUM_SAMPLES - 1 < 2**63
    assert (folded - seed) % MAX_SEED == 0
    if 0 <= seed < MAX_SEED:
        assert folded == seed


@pytest.mark.parametrize("seed", [2**64, -(2**63) - 1, 10**30])
def test_seeds_beyond_64_bits_are_refused(seed: int) -> None:
    assert refused({"seed": seed}).field == "sampling_params.seed"


@pytest.mark.parametrize(
    ("max_tokens", "limits", "expected"),
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
def test_max_tokens_is_cut_to_the_context(max_tokens: int | None, limits: ContextLimits, expected: int | None) -> None:
    assert job({"max_tokens": max_tokens}, limits).max_tokens == expected


def test_a_prompt_that_fills_the_context_is_refused() -> None:
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
def test_an_invalid_prompt_is_refused(prompt: Any, field: str) -> None:
    assert refused(prompt=prompt).field == field


def test_the_decoder_looks_at_the_ids_of_all_chunks() -> None:
    ends = json.dumps(body(prompt={"chunks": [{"tokens": [0, 99]}, {"tokens": [99, 0]}]})).encode()
    assert sample_request.decode_sample_request(ends, 100).checked_vocab == 100
    assert sample_request.decode_sample_request(ends, 99).checked_vocab is None
    assert sample_request.decode_sample_request(ends, None).checked_vocab is None


def test_the_ids_of_a_request_that_was_decoded_for_another_vocabulary_are_looked_at_again() -> None:
    sent = json.dumps(body(prompt={"chunks": [{"tokens": [1, 150]}]})).encode()
    request = sample_request.decode_sample_request(sent, 200)
    with pytest.raises(RequestError, match="token id 150"):
        make_job(request, request_id="r", session_key="k", model="m", weights=BaseWeights(), limits=LIMITS)


def test_the_refusal_names_the_token_id() -> None:
    assert "token id 107 is not in [0, 100)" in refused(prompt={"chunks": [{"tokens": [1, 107, 108]}]}).message


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"temperature": -0.1}, "sampling_params.temperature"),
        ({"top_p": 0.0}, "sampling_params.top_p"),
        ({"top_p": 1.1}, "sampling_params.top_p"),
        ({"top_p": -1}, "sampling_params.top_p"),
        ({"top_k": -2}, "sampling_params.top_k"),
        ({"max_tokens": 0}, "sampling_params.max_tokens"),
        ({"max_tokens": -1}, "sampling_params.max_tokens"),
    ],
)
def test_sampling_parameters_out_of_range_are_refused(params: dict[str, Any], field: str) -> None:
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
        {"prompt_logprobs_last_n": 0, "prompt_logprobs": True},
        {"prompt_logprobs_last_n": 3, "prompt_logprobs": True},
        {"prompt_logprobs_last_n": 1},
        {"prompt_logprobs_last_n": 1, "prompt_logprobs": False, "topk_prompt_logprobs": 1},
        {"prompt_alt_tokens_k": -1},
        {"prompt_alt_tokens_k": MAX_TOPK + 1},
    ],
)
def test_options_out_of_range_are_refused(changes: dict[str, Any]) -> None:
    assert refused(**changes).field == next(iter(changes))


@pytest.mark.parametrize(
    ("params", "changes"),
    [
        ({"temperature": 0}, {}),
        ({"temperature": 1e300}, {}),
        ({"top_p": 1e-6}, {}),
        ({}, {"num_samples": MAX_NUM_SAMPLES}),
        ({}, {"topk_sample_logprobs": MAX_TOPK, "topk_prompt_logprobs": MAX_TOPK}),
        ({}, {"target_prompt_logprobs": None, "prompt_alt_tokens_k": 0}),
        ({}, {"prompt_alt_tokens_k": MAX_TOPK}),
        ({}, {"prompt_logprobs_last_n": 2, "prompt_logprobs": True}),
    ],
)
def test_values_at_the_ends_of_their_ranges_are_accepted(params: dict[str, Any], changes: dict[str, Any]) -> None:
    job(params, **changes)


def test_a_top_k_of_zero_means_no_limit() -> None:
    assert job({"top_k": 0}).distribution.top_k == -1


def test_prompt_logprobs_last_n_becomes_part_of_the_job() -> None:
    sample_job = job(prompt_logprobs=True, prompt_logprobs_last_n=2)
    assert (sample_job.prompt_logprobs, sample_job.prompt_logprobs_last_n) == (True, 2)
    assert job(prompt_logprobs=False).prompt_logprobs is False


def target(data: list[Any], shape: Any = (2, 2), **more: Any) -> dict[str, Any]:
    """A tensor of target ids for the prompt of three tokens, which has two scored positions."""
    return {"data": data, "dtype": "int64", "shape": list(shape)} | more


def csr(data: list[int], crow: list[int], col: list[int], columns: int = 4) -> dict[str, Any]:
    return target(data, (2, columns), sparse_crow_indices=crow, sparse_col_indices=col)


def test_a_dense_target_keeps_its_values_and_shape() -> None:
    stored = job(target_prompt_logprobs=target([4, -1, 0, 99])).target
    assert stored is not None
    assert (stored.values.tolist(), stored.shape, stored.crow) == ([4, -1, 0, 99], (2, 2), None)
    assert stored.row_of_value().tolist() == [0, 0, 1, 1]


def test_a_sparse_target_stays_sparse() -> None:
    stored = job(target_prompt_logprobs=csr([-1, 7, 3], [0, 1, 3], [3, 0, 2], columns=2**28)).target
    assert stored is not None
    assert stored.crow is not None
    assert stored.col is not None
    assert (stored.values.tolist(), stored.crow.tolist(), stored.col.tolist()) == ([-1, 7, 3], [0, 1, 3], [3, 0, 2])
    assert stored.row_of_value().tolist() == [0, 1, 1]


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        ({"data": [1.0, 1.0], "dtype": "float32", "shape": [2, 1]}, "int64"),
        ({"data": [1, 1], "shape": [2, 1]}, "int64"),
        (target([1.5, 1], (2, 1)), "does not fit int64"),
        (target([1] * 6, (3, 2)), r"\[2, K\] for a prompt of 3 tokens, got \[3, 2\]"),
        (target([1, 2], (2,)), r"\[2, K\]"),
        (target([1, 2], ()), r"\[2, K\]"),
        (target([1] * 4, (2, 2, 1)), r"\[2, K\]"),
        (target([1, 2, 3]), "does not fit 3 elements"),
        (target([1, 100, 1, 1]), "token id 100 is neither"),
        (target([1, -2, 1, 1]), "token id -2 is neither"),
        (target([-1] * 4), "at least one"),
        (target([], (2, 0)), "at least one"),
        (csr([], [0, 0, 0], []), "at least one"),
        (csr([-1], [0, 1, 1], [0]), "at least one"),
        (csr([1], [0, 1], [0]), "CSR"),
        (csr([1], [0, 1, 2], [0]), "CSR"),
        (csr([1], [0, 1, 1], [4]), "CSR"),
        (csr([1], [0, 1, 1], [0], columns=-1), "out of bounds"),
        (csr([1], [0, 1, 1], [0], columns=2**70), "out of bounds"),
        (target([1], (2, 1), sparse_col_indices=[0]), "both"),
    ],
)
def test_an_invalid_target_is_refused(tensor: dict[str, Any], message: str) -> None:
    error = refused(target_prompt_logprobs=tensor)
    assert error.field == "target_prompt_logprobs"
    assert re.search(message, error.message)


@pytest.mark.parametrize("value", [{"dtype": "int64"}, {"data": "x", "dtype": "int64"}, {"data": [1], "dtype": "int8"}])
def test_a_target_that_is_no_tensor_is_refused(value: dict[str, Any]) -> None:
    field = refused(target_prompt_logprobs=value).field
    assert field is not None
    assert field.startswith("target_prompt_logprobs.")


def test_a_prompt_of_one_token_can_have_alternatives_but_no_targets() -> None:
    one = {"chunks": [{"tokens": [1]}]}
    assert refused(prompt=one, target_prompt_logprobs=target([], (0, 1))).field == "target_prompt_logprobs"
    assert refused(prompt=one, prompt_logprobs=True, prompt_logprobs_last_n=1).field == "prompt_logprobs_last_n"
    assert job(prompt=one, prompt_alt_tokens_k=2).alternatives == 2


@pytest.mark.parametrize(
    ("tokens", "columns", "draws", "topk", "field"),
    [
        (2049, 64, 0, 0, None),
        (2050, 64, 0, 0, "target_prompt_logprobs"),
        (2049, 0, 64, 0, None),
        (2050, 0, 64, 0, "prompt_alt_tokens_k"),
        (1025, 64, 64, 0, None),
        (1026, 64, 64, 0, "target_prompt_logprobs"),
        (1026, 63, 64, 0, None),
        (1042, 63, 64, 0, "prompt_alt_tokens_k"),
        (1025, 1, 0, 64, None),
        (2049, 1, 0, 64, "target_prompt_logprobs"),
    ],
)
def test_the_number_of_scores_of_one_request_is_bounded(
    tokens: int, columns: int, draws: int, topk: int, field: str | None
) -> None:
    ids = target([1] * ((tokens - 1) * columns), (tokens - 1, columns)) if columns else None
    options = {
        "prompt": {"chunks": [{"tokens": [1] * tokens}]},
        "target_prompt_logprobs": ids,
        "prompt_alt_tokens_k": draws,
        "topk_prompt_logprobs": topk,
    }
    if field is None:
        assert job(limits=UNKNOWN, **options).alternatives == draws
    else:
        assert refused(limits=UNKNOWN, **options).field == field


@pytest.mark.parametrize(
    ("samples", "tokens", "topk", "context", "fits"),
    [
        (4096, 4096, 0, None, True),
        (4096, 4097, 0, None, False),
        (4096, 63, 64, None, True),
        (4096, 64, 64, None, False),
        (4096, 10**9, 0, 4099, True),
        (4096, None, 0, 4100, False),
        (4096, None, 64, None, True),
    ],
)
def test_the_tokens_and_logprobs_of_one_answer_are_bounded(
    samples: int, tokens: int | None, topk: int, context: int | None, *, fits: bool
) -> None:
    """The whole answer is in memory. A greedy request is bounded too, although vLLM computes only one sequence."""
    params, limits = {"temperature": 0, "max_tokens": tokens}, ContextLimits(max_context=context)
    options = {"num_samples": samples, "topk_sample_logprobs": topk}
    if fits:
        assert job(params, limits, **options).num_samples == samples
    else:
        assert refused(params, limits, **options).field == "num_samples"


@pytest.mark.parametrize(
    ("tokens", "options", "field"),
    [
        (2**19, {"prompt_logprobs": True}, None),
        (2**19 + 1, {"prompt_logprobs": True}, "prompt_logprobs"),
        (2**19 + 1, {}, None),
        (4096, {"topk_prompt_logprobs": 64}, None),
        (8065, {"topk_prompt_logprobs": 64}, None),
        (8066, {"topk_prompt_logprobs": 64}, "topk_prompt_logprobs"),
        (8066, {"topk_prompt_logprobs": 64, "prompt_logprobs": True}, "topk_prompt_logprobs"),
        (24966, {"topk_prompt_logprobs": 20}, None),
        (24967, {"topk_prompt_logprobs": 20}, "topk_prompt_logprobs"),
        (4096, {"num_samples": 4096}, None),
        (4097, {"num_samples": 4096}, "num_samples"),
        (4097, {"num_samples": 4095}, None),
        (4097, {"num_samples": 4096, "sampling_params": {"temperature": 0, "max_tokens": 1}}, None),
        (4000, {"num_samples": 4096, "prompt_logprobs": True, "topk_prompt_logprobs": 64}, None),
    ],
)
def test_the_prompts_part_of_an_answer_is_bounded(tokens: int, options: dict[str, Any], field: str | None) -> None:
    """vLLM sends the prompt's logprobs once, and the prompt's ids with every sequence; a greedy request has one
    sequence."""
    request = {"prompt": {"chunks": [{"tokens": [1] * tokens}]}, "sampling_params": {"max_tokens": 1}} | options
    if field is None:
        assert len(job(limits=UNKNOWN, **request).prompt) == tokens
        return
    error = refused(limits=UNKNOWN, **request)
    assert error.field == field
    assert str(tokens) in error.message
    assert re.search(r"than the \d+ ", error.message), "the message says how many are allowed"


def test_a_temperature_of_zero_is_greedy() -> None:
    assert job({"temperature": 0}).greedy
    assert not job({"temperature": 1e-6}).greedy
