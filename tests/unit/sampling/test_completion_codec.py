"""The request that a sample job sends to vLLM, and the result made of vLLM's answer. The SDK's own decoder reads the
results.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec
import numpy as np
import pytest
from tinker import SampleResponse
from tinker.proto.response_conv import deserialize_sample_response

from skyrl.base.types.weights import AdapterVersion
from skyrl.base.wire.results import to_json
from skyrl.base.wire.sample_request import Distribution
from skyrl.base.wire.tensors import WireTensor
from skyrl.inference.vllm_plugin.protocol import PromptScores, pack_cells
from skyrl.sampling.completion import (
    AbortedAnswer,
    MalformedAnswer,
    MissingLogprobs,
    decode_answer,
    encode_request,
)
from skyrl.sampling.job import SampleJob
from tests import sample_jobs

JOB = msgspec.structs.replace(sample_jobs.JOB, model="m1@2", weights=AdapterVersion("m1@2"), max_tokens=8)
GREEDY = Distribution(temperature=0.0)


def job(**changes: Any) -> SampleJob:
    return msgspec.structs.replace(JOB, **changes)


def choice(tokens: list[int], logprobs: list[float] | None = None, **more: Any) -> dict[str, Any]:
    token_logprobs = [-0.5 * (step + 1) for step in range(len(tokens))] if logprobs is None else logprobs
    return {
        "index": 0,
        "finish_reason": "stop",
        "token_ids": tokens,
        "logprobs": {"token_logprobs": token_logprobs},
    } | more


def answer(*choices: dict[str, Any], **more: Any) -> bytes:
    return json.dumps({"choices": choices} | more).encode()


def request_of(**changes: Any) -> dict[str, Any]:
    return json.loads(encode_request(job(**changes)))


def read(body: bytes, job: SampleJob, **options: Any) -> SampleResponse:
    """The result as the SDK reads it."""
    return deserialize_sample_response(decode_answer(body, job, **options).body)


# Requests


def test_a_plain_request_names_every_parameter_and_no_other() -> None:
    assert request_of() == {
        "model": "m1@2",
        "prompt": [5, 6, 7],
        "n": 1,
        "max_tokens": 8,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "logprobs": 0,
        "return_token_ids": True,
        "stream": False,
    }


def test_the_request_has_a_priority_only_if_one_is_given() -> None:
    assert json.loads(encode_request(JOB, 7)) == request_of() | {"priority": 7}
    assert json.loads(encode_request(JOB, 0))["priority"] == 0
    assert "priority" not in request_of()


@pytest.mark.parametrize(
    ("changes", "adds"),
    [
        ({"seed": 0}, {"seed": 0}),
        ({"stop_strings": ["a", "b"]}, {"stop": ["a", "b"], "skip_special_tokens": False}),
        ({"stop_token_ids": [3, 0]}, {"stop_token_ids": [3, 0]}),
        ({"ignore_eos": True}, {"ignore_eos": True}),
        ({"max_tokens": None}, {"max_tokens": None}),
        ({"num_samples": 3}, {"n": 3}),
        ({"prompt_logprobs": True}, {"prompt_logprobs": 0}),
        ({"prompt_logprobs": True, "topk_prompt": 4}, {"prompt_logprobs": 4}),
        ({"topk_prompt": 4}, {"prompt_logprobs": 4}),
        ({"topk_sample": 4}, {"logprobs": 4, "return_tokens_as_token_ids": True}),
        ({"distribution": Distribution(0.5, 7, 0.9)}, {"temperature": 0.5, "top_p": 0.9, "top_k": 7}),
    ],
)
def test_a_jobs_options_become_request_parameters(changes: dict[str, Any], adds: dict[str, Any]) -> None:
    assert request_of(**changes) == request_of() | adds


def test_a_greedy_job_asks_for_one_choice_and_repeats_it() -> None:
    greedy: dict[str, Any] = {"distribution": GREEDY, "num_samples": 3}
    assert request_of(**greedy)["n"] == 1
    result = read(answer(choice([1, 2])), job(**greedy))
    assert [sequence.tokens for sequence in result.sequences] == [[1, 2]] * 3
    assert [sequence.logprobs for sequence in result.sequences] == [[-0.5, -1.0]] * 3


def test_a_greedy_job_refuses_two_choices() -> None:
    with pytest.raises(MalformedAnswer, match="2 choices for 1 samples"):
        decode_answer(answer(choice([1]), choice([1])), job(distribution=GREEDY, num_samples=2))


# Answers


def test_sequences_come_in_the_order_of_their_index() -> None:
    body = answer(choice([2], index=1, finish_reason="length"), choice([1], index=0))
    result = read(body, job(num_samples=2))
    assert [(s.stop_reason, s.tokens, s.logprobs) for s in result.sequences] == [
        ("stop", [1], [-0.5]),
        ("length", [2], [-0.5]),
    ]
    assert result.prompt_logprobs is None
    assert result.topk_prompt_logprobs is None
    assert result.sequences[0].topk_logprobs is None
    assert result.prompt_cache_hit_tokens == 0


@pytest.mark.parametrize("topk", [0, 2])
@pytest.mark.parametrize("logprobs", [None, {"token_logprobs": [], "top_logprobs": []}])
def test_an_answer_without_tokens_is_an_empty_sequence(topk: int, logprobs: Any) -> None:
    body = answer(choice([]) | {"logprobs": logprobs})
    result = read(body, job(topk_sample=topk))
    assert result.sequences[0].tokens == []


@pytest.mark.parametrize(
    ("usage", "hits"),
    [
        (None, 0),
        ({"prompt_tokens": 3}, 0),
        ({"prompt_tokens_details": None}, 0),
        ({"prompt_tokens_details": {"cached_tokens": None}}, 0),
        ({"prompt_tokens_details": {"cached_tokens": 2}}, 2),
        ({"prompt_tokens_details": {"cached_tokens": 4}}, 3),  # more than the prompt has
        ({"prompt_tokens_details": {"cached_tokens": -1}}, 0),
    ],
)
def test_the_prompt_cache_hits_come_from_vllms_usage(usage: Any, hits: int) -> None:
    result = read(answer(choice([1]), usage=usage), JOB)
    assert result.prompt_cache_hit_tokens == hits


def test_an_answer_counts_prompt_cached_and_sampled_tokens() -> None:
    usage = {"prompt_tokens_details": {"cached_tokens": 2}}
    counted = decode_answer(answer(choice([1, 2, 3]), choice([1], index=1), usage=usage), job(num_samples=2))
    assert (counted.prompt_tokens, counted.cached_tokens, counted.sampled_tokens) == (3, 2, 4)
    greedy = decode_answer(answer(choice([1, 2])), job(distribution=GREEDY, num_samples=3))
    assert (greedy.prompt_tokens, greedy.cached_tokens, greedy.sampled_tokens) == (3, 0, 6)


def test_an_answer_counts_sequences_at_their_bound_and_the_surprise_of_tokens_that_were_drawn() -> None:
    """Greedy tokens are not drawn: their logprobs say nothing of an entropy."""
    cut, whole = choice([1, 2, 3], finish_reason="length"), choice([1], index=1, finish_reason="stop")
    for each, logprobs in ((cut, [-1.0, -2.0, -0.5]), (whole, [-0.25])):
        each["logprobs"] = {"token_logprobs": logprobs}
    counted = decode_answer(answer(cut, whole), job(num_samples=2))
    assert (counted.samples, counted.truncated) == (2, 1)
    assert (counted.surprise, counted.surprise_tokens) == (3.75, 4)
    greedy = decode_answer(answer(cut), job(distribution=GREEDY))
    assert (greedy.samples, greedy.truncated, greedy.surprise, greedy.surprise_tokens) == (1, 1, 0.0, 0)


@pytest.mark.parametrize(
    ("found", "cached", "again"),
    [
        ([0, 0, 0], 0, 6),
        ([0, 2, 2], 2, 4),  # vLLM's usage says what the last one has found
        ([2, 2, 2], 2, 2),
        ([0, 2, None], 2, 0),
        ([None, None, None], 2, 0),
    ],
)
def test_prompt_tokens_that_several_sequences_compute_are_counted(
    found: list[int | None], cached: int, again: int
) -> None:
    choices = [choice([1], index=index) | {"cached_prompt_tokens": each} for index, each in enumerate(found)]
    usage = {"prompt_tokens_details": {"cached_tokens": cached}}
    counted = decode_answer(answer(*choices, usage=usage), job(num_samples=3))
    assert (counted.prompt_tokens, counted.cached_tokens, counted.computed_again) == (3, cached, again)


def test_fields_of_later_versions_are_ignored() -> None:
    body = answer(choice([1], routed_experts=[[1]], stop_reason=7), kv_transfer_params={"a": 1}, id="cmpl-1")
    assert read(body, JOB).sequences[0].tokens == [1]


# Prompt logprobs


ROWS: list[Any] = [
    None,
    {"6": {"logprob": -1.5, "rank": 3, "decoded_token": "x"}, "9": {"logprob": -0.25}, "8": {"logprob": -0.5}},
    {"7": {"logprob": -2.0, "rank": 1}, "1": {"logprob": -3.0}},
]
SCORED = choice([1], prompt_logprobs=ROWS)


def test_prompt_logprobs_are_those_of_the_prompts_own_tokens() -> None:
    body = decode_answer(answer(SCORED), job(prompt_logprobs=True)).body
    result = deserialize_sample_response(body)
    assert result.prompt_logprobs == [None, -1.5, -2.0]
    assert result.topk_prompt_logprobs is None
    assert json.loads(to_json(body, "proto:sample"))["prompt_logprobs"] == [None, -1.5, -2.0]


@pytest.mark.parametrize(
    ("last_n", "logprobs", "topk"),
    [
        (1, [None, None, -2.0], [None, None, [(7, -2.0)]]),
        (2, [None, -1.5, -2.0], [None, [(9, -0.25)], [(7, -2.0)]]),
        (3, [None, -1.5, -2.0], [None, [(9, -0.25)], [(7, -2.0)]]),
        (99, [None, -1.5, -2.0], [None, [(9, -0.25)], [(7, -2.0)]]),
    ],
)
def test_only_the_last_n_prompt_positions_have_logprobs(last_n: int, logprobs: list[Any], topk: list[Any]) -> None:
    scored_job = job(prompt_logprobs=True, prompt_logprobs_last_n=last_n, topk_prompt=1)
    result = read(answer(SCORED), scored_job)
    assert result.prompt_logprobs == logprobs
    assert result.topk_prompt_logprobs == topk


def test_prompt_topk_is_sorted_and_cut_and_none_for_the_first_token() -> None:
    body = decode_answer(answer(SCORED), job(topk_prompt=2)).body
    result = deserialize_sample_response(body)
    rows = [None, [(9, -0.25), (8, -0.5)], [(7, -2.0), (1, -3.0)]]
    assert result.topk_prompt_logprobs == rows
    assert result.prompt_logprobs is None
    in_json = json.loads(to_json(body, "proto:sample"))["topk_prompt_logprobs"]
    assert in_json == [None, [[9, -0.25], [8, -0.5]], [[7, -2.0], [1, -3.0]]]


def test_prompt_topk_may_have_fewer_than_k_entries() -> None:
    result = read(answer(SCORED), job(topk_prompt=5))
    assert result.topk_prompt_logprobs == [
        None,
        [(9, -0.25), (8, -0.5), (6, -1.5)],
        [(7, -2.0), (1, -3.0)],
    ]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (None, "0 rows of prompt logprobs for 3 tokens"),
        (ROWS[:2], "2 rows of prompt logprobs for 3 tokens"),
        ([None, None, ROWS[2]], "no logprob for prompt token 1"),
        ([None, {"9": {"logprob": -1.0}}, ROWS[2]], "no logprob for prompt token 1"),
        ([None, {"6": {}}, ROWS[2]], "not a completion"),
    ],
)
def test_incomplete_prompt_logprobs_are_malformed(rows: Any, message: str) -> None:
    with pytest.raises(MalformedAnswer, match=message):
        decode_answer(answer(choice([1], prompt_logprobs=rows)), job(prompt_logprobs=True))


# Rows that the plugin appends

IDS = np.asarray([[4, -1], [9, 4]])
DENSE = WireTensor(IDS.ravel(), (2, 2))
SPARSE = WireTensor(np.asarray([9, -1, 4]), (2, 400), np.asarray([0, 1, 3]), np.asarray([399, 0, 7]))


def appended(*cells: tuple[int, float]) -> bytes:
    """The rows of SCORED, then one row per cell."""
    return answer(choice([1], prompt_logprobs=[*ROWS, *({str(token): {"logprob": value}} for token, value in cells)]))


def test_target_ids_and_alternatives_are_requested_from_the_plugin() -> None:
    def plugin_request(**changes: Any) -> PromptScores:
        body = request_of(**changes)
        assert body["prompt_logprobs"] == changes.get("topk_prompt", 0)
        arrived = PromptScores.from_extra_args(body["vllm_xargs"], 3, 500)
        assert arrived is not None
        return arrived

    dense = plugin_request(target=DENSE, topk_prompt=2, seed=5)
    assert (dense.rows.tolist(), dense.ids.tolist(), dense.draws, dense.seed) == ([0, 1, 1], [4, 9, 4], 0, None)
    sparse = plugin_request(target=SPARSE, alternatives=3, seed=5)
    assert (sparse.rows.tolist(), sparse.ids.tolist(), sparse.draws, sparse.seed) == ([0, 1], [9, 4], 3, 5)
    assert plugin_request(alternatives=1).seed is None
    assert "vllm_xargs" not in request_of(seed=5, prompt_logprobs=True)


def test_target_logprobs_have_the_layout_of_the_ids() -> None:
    dense = read(appended((4, -1.0), (9, -2.0), (4, -3.0)), job(target=DENSE)).target_prompt_logprobs
    assert dense is not None
    assert (dense.dtype, dense.shape, dense.sparse_crow_indices) == ("float32", [2, 2], None)
    assert dense.tolist() == [[-1.0, 0.0], [-2.0, -3.0]]
    body = decode_answer(appended((9, -1.5), (4, -2.5)), job(target=SPARSE)).body
    sparse = deserialize_sample_response(body).target_prompt_logprobs
    assert sparse is not None
    assert (sparse.data, sparse.shape) == ([-1.5, 0.0, -2.5], [2, 400])
    assert (sparse.sparse_crow_indices, sparse.sparse_col_indices) == ([0, 1, 3], [399, 0, 7])
    assert json.loads(to_json(body, "proto:sample"))["target_prompt_logprobs"] == {
        "data": [-1.5, 0.0, -2.5],
        "dtype": "float32",
        "shape": [2, 400],
        "sparse_crow_indices": [0, 1, 3],
        "sparse_col_indices": [399, 0, 7],
    }


def test_alternatives_keep_order_and_repetitions() -> None:
    cells = [(4, -1.0), (9, -2.0), (4, -3.0), (7, -0.5), (7, -0.5), (8, -1.5), (8, -1.25)]
    scored_job = job(target=DENSE, alternatives=2, prompt_logprobs=True, topk_prompt=1)
    body = decode_answer(appended(*cells), scored_job).body
    result = deserialize_sample_response(body)
    assert result.prompt_alt_tokens is not None
    assert result.prompt_alt_tokens.tokens.dtype == "int64"
    assert result.prompt_alt_tokens.tokens.tolist() == [[7, 7], [8, 8]]
    assert result.prompt_alt_tokens.logprobs.tolist() == [[-0.5, -0.5], [-1.5, -1.25]]
    assert result.prompt_logprobs == [None, -1.5, -2.0]
    assert result.topk_prompt_logprobs == [None, [(9, -0.25)], [(7, -2.0)]]
    assert json.loads(to_json(body, "proto:sample"))["prompt_alt_tokens"] == {
        "tokens": {"data": [7, 7, 8, 8], "dtype": "int64", "shape": [2, 2]},
        "logprobs": {"data": [-0.5, -0.5, -1.5, -1.25], "dtype": "float32", "shape": [2, 2]},
    }


# The same as arrays


def in_both_forms(ids: list[list[int]], logprobs: list[list[float]], *cells: tuple[int, float]) -> tuple[bytes, bytes]:
    """What vLLM sends of rows of cells, the prompt's own token first in each, and of appended cells."""
    values = np.asarray(logprobs, np.float32)
    rows = [
        {str(token): {"logprob": value} for token, value in zip(*row, strict=True)}
        for row in zip(ids, values.tolist(), strict=True)
    ]
    more = np.asarray([value for _, value in cells], np.float32)
    rows += [{str(token): {"logprob": value}} for (token, _), value in zip(cells, more.tolist(), strict=True)]
    all_ids = np.concatenate([np.ravel(np.asarray(ids, np.int32)), np.asarray([token for token, _ in cells], np.int32)])
    packed = pack_cells(all_ids, np.concatenate([values.ravel(), more]))
    return (
        answer(choice([1], prompt_logprobs=[None, *rows])),
        answer(choice([1], prompt_logprobs=None, prompt_cells=packed)),
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt_logprobs": True},
        {"prompt_logprobs": True, "prompt_logprobs_last_n": 1},
        {"prompt_logprobs": True, "prompt_logprobs_last_n": 9, "target": DENSE, "alternatives": 1},
        {"target": SPARSE},
    ],
)
def test_arrays_give_the_bits_that_rows_give(changes: dict[str, Any]) -> None:
    """The own token is among the best, beside them, as good as the last of them, or impossible as others are."""
    rows = [
        ([6, 6, 9, 8], [-0.1, -0.1, -0.5, -1.7]),
        ([7, 9, 8, 1], [-3.0, -0.1, -0.25, -0.3]),
        ([7, 9, 8, 1], [-0.3, -0.1, -0.25, -0.3]),
        ([4, 9, 8, 4], [-9999.0, -1e-7, -9999.0, -9999.0]),
    ]
    for second in rows[1:]:
        ids, values = [rows[0][0], [7, *second[0][1:]]], [rows[0][1], second[1]]
        wanted = job(**changes, topk_prompt=3, seed=5)
        cells = (
            [] if wanted.target is None else [(4, -1.0), (9, -0.7), (4, -3.1)][: int((wanted.target.values >= 0).sum())]
        )
        if wanted.target is SPARSE:
            cells = [(9, -1.0), (4, -0.7)]
        cells += [(3, -0.2), (4, -0.3)] if wanted.alternatives else []
        as_rows, as_cells = in_both_forms(ids, values, *cells)
        assert decode_answer(as_cells, wanted).body == decode_answer(as_rows, wanted).body


@pytest.mark.parametrize(
    ("ids", "values", "message"),
    [
        ([6], [-1.0], "1 cells of prompt logprobs for 2 x 1"),
        ([6, 8], [-1.0, -1.0], "other tokens"),
        ([6, 7], [-1.0, float("nan")], "not computed"),
    ],
)
def test_arrays_that_are_no_answer_are_malformed(ids: list[int], values: list[float], message: str) -> None:
    packed = pack_cells(np.asarray(ids, np.int32), np.asarray(values, np.float32))
    with pytest.raises(MalformedAnswer, match=message):
        decode_answer(answer(choice([1], prompt_cells=packed)), job(prompt_logprobs=True))


def test_a_prompt_of_one_token_has_no_alternatives() -> None:
    body = answer(choice([1], prompt_logprobs=[None]))
    drawn = read(body, job(prompt=[5], alternatives=3)).prompt_alt_tokens
    assert drawn is not None
    assert drawn.tokens.shape == drawn.logprobs.shape == [0, 3]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (answer(SCORED), "3 rows of prompt logprobs for 3 tokens and 3 of the plugin"),
        (appended((4, -1.0), (9, -2.0)), "5 rows"),
        (appended((4, -1.0), (9, -2.0), (5, -3.0)), "other tokens"),
        (appended((9, -1.0), (4, -2.0), (4, -3.0)), "other tokens"),
        (answer(choice([1], prompt_logprobs=[*ROWS, *ROWS])), "does not hold one token"),
        (answer(choice([1])), "0 rows"),
    ],
)
def test_an_answer_without_the_plugins_rows_is_malformed(body: bytes, message: str) -> None:
    """A vLLM without the plugin ignores the request for them."""
    with pytest.raises(MalformedAnswer, match=message):
        decode_answer(body, job(target=DENSE))


# Top-k of sampled tokens


def sampled_topk(*rows: dict[str, float] | None) -> bytes:
    tokens = list(range(1, len(rows) + 1))
    logprobs = {"token_logprobs": [-9.0] * len(rows), "top_logprobs": rows}
    return answer(choice(tokens, logprobs=None) | {"logprobs": logprobs})


def test_sample_topk_is_sorted_and_cut() -> None:
    """vLLM adds the sampled token to the k best tokens, and writes -9999 for tokens that top_p or top_k excludes."""
    body = sampled_topk(
        {"token_id:4": -2.0, "token_id:0": -1.0, "token_id:1": -9.0},
        {"token_id:2": -0.5, "token_id:7": -9999.0},
        None,
    )
    encoded = decode_answer(body, job(topk_sample=2)).body
    rows = deserialize_sample_response(encoded).sequences[0].topk_logprobs
    assert rows == [[(0, -1.0), (4, -2.0)], [(2, -0.5)], None]
    in_json = json.loads(to_json(encoded, "proto:sample"))["sequences"][0]["topk_logprobs"]
    assert in_json == [[[0, -1.0], [4, -2.0]], [[2, -0.5]], None]


@pytest.mark.parametrize(
    "body",
    [
        sampled_topk({" the": -1.0}),
        answer(choice([1, 2], logprobs=None) | {"logprobs": {"token_logprobs": [-1, -1], "top_logprobs": [{}]}}),
        answer(choice([1])),
        answer(choice([1], logprobs=None) | {"logprobs": {"token_logprobs": [-1], "top_logprobs": ["x"]}}),
    ],
    ids=["keyed by text", "ragged", "absent", "no rows"],
)
def test_incomplete_sample_topk_is_malformed(body: bytes) -> None:
    with pytest.raises(MalformedAnswer):
        decode_answer(body, job(topk_sample=2))


def test_rows_of_best_tokens_are_not_read_when_nobody_asked_for_them() -> None:
    logprobs = {"token_logprobs": [-1], "top_logprobs": ["x"]}
    result = read(answer(choice([1], logprobs=None) | {"logprobs": logprobs}), job(topk_sample=0))
    assert result.sequences[0].logprobs == [-1.0]


# Refusals


def test_a_stop_by_a_token_is_a_stop() -> None:
    (sequence,) = read(answer(choice([1, 2], finish_reason="stop_token")), job()).sequences
    assert (sequence.stop_reason, sequence.tokens) == ("stop", [1, 2])


@pytest.mark.parametrize("reason", ["abort", None, "error", ""])
def test_any_other_finish_reason_is_an_abort(reason: str | None) -> None:
    with pytest.raises(AbortedAnswer, match=f"finish_reason {reason!r}"):
        decode_answer(answer(choice([1], finish_reason=reason)), JOB)
    choice_without_reason = choice([1])
    del choice_without_reason["finish_reason"]
    with pytest.raises(AbortedAnswer):
        decode_answer(answer(choice_without_reason), JOB)


def test_an_aborted_answer_is_an_abort_whatever_else_is_wrong_with_it() -> None:
    aborted = choice([1], finish_reason="abort") | {"logprobs": None, "token_ids": None, "index": 1}
    with pytest.raises(AbortedAnswer):
        decode_answer(answer(choice([1]) | {"logprobs": None}, aborted), job(num_samples=2))


@pytest.mark.parametrize("logprobs", [None, {}, {"token_logprobs": None}, {"token_logprobs": [-1.0, None]}])
def test_missing_logprobs_raise_or_become_zeros(logprobs: Any) -> None:
    body = answer(choice([1, 2]) | {"logprobs": logprobs})
    with pytest.raises(MissingLogprobs):
        decode_answer(body, JOB)
    filled = read(body, JOB, zero_fill=True).sequences[0].logprobs
    assert filled is not None
    assert filled[1] == 0.0


@pytest.mark.parametrize("zero_fill", [False, True])
def test_logprobs_of_another_number_than_tokens_are_never_filled_with_zeros(zero_fill: bool) -> None:
    with pytest.raises(MalformedAnswer, match="1 logprobs for 2 tokens") as caught:
        decode_answer(answer(choice([1, 2], logprobs=[-1.0])), JOB, zero_fill=zero_fill)
    assert not isinstance(caught.value, MissingLogprobs)


@pytest.mark.parametrize("body", [b"", b"null", b"<html>", b"{}", b'{"choices": "\xff"}', b'{"choices": [1]}'])
def test_a_body_that_is_no_completion_is_malformed(body: bytes) -> None:
    with pytest.raises(MalformedAnswer, match="not a completion"):
        decode_answer(body, JOB)


@pytest.mark.parametrize("tokens", [[2**31], [-(2**31) - 1]])
def test_tokens_beyond_32_bits_are_malformed(tokens: list[int]) -> None:
    with pytest.raises(MalformedAnswer, match="not token ids"):
        decode_answer(answer(choice(tokens)), JOB)
