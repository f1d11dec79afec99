"""What vLLM has sampled as SGLang's reasons and lists; lengths of prompts and outputs against the context."""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np
import pytest

from skyrl.inference.sidecar.completion import Collected, finish_reason, kept_tokens, logprob_lists, to_int32
from skyrl.inference.sidecar.errors import BadRequest, VllmBroke
from skyrl.inference.sidecar.generate_request import Logprobs, read_generate
from skyrl.inference.sidecar.sampling import new_tokens

ABORT = {"type": "abort", "status_code": None, "err_type": None}


@pytest.mark.parametrize(
    ("collected", "expected"),
    [
        (Collected(tokens=[4, 2], finish="stop"), {"type": "stop", "matched": 2}),
        (Collected(tokens=[4, 3], finish="stop", matched=3), {"type": "stop", "matched": 3}),
        (Collected(tokens=[4], finish="stop", matched="</a>"), {"type": "stop", "matched": "</a>"}),
        (Collected(tokens=[4, 5], finish="length"), {"type": "length", "length": 2}),
        (Collected(tokens=[4], finish="abort"), ABORT | {"message": "Aborted"}),
        (Collected(finish="abort"), ABORT | {"message": "Abort in waiting queue"}),
        (Collected(tokens=[4]), None),
    ],
)
def test_reasons(collected: Collected, expected: Any) -> None:
    assert finish_reason(collected, aborted=False, scoring=False) == expected


def test_what_an_abort_left_without_a_reason_is_aborted() -> None:
    assert finish_reason(Collected(tokens=[4]), aborted=True, scoring=False) == ABORT | {"message": "Aborted"}
    ended = finish_reason(Collected(tokens=[4], finish="length"), aborted=True, scoring=False)
    assert ended == {"type": "length", "length": 1}
    assert finish_reason(Collected(tokens=[4], finish="stop"), aborted=False, scoring=True) == {
        "type": "length",
        "length": 0,
    }


def test_lists_of_logprobs() -> None:
    collected = Collected(
        tokens=[8],
        logprobs=[-2.0],
        alternatives=[[(-0.5, 9), (-1.0, 7), (-2.0, 8)]],
        prompt=[{}, {6: -3.0, 1: -0.1}, {7: -4.0, 2: -0.2}],
    )
    lists = logprob_lists(Logprobs(start=1, top=1), collected, [5, 6, 7], None, scoring=False)
    assert lists == {
        "input_token_logprobs": [[None, 6, None], [-4.0, 7, None]],
        "output_token_logprobs": [[-2.0, 8, None]],
        "input_top_logprobs": [None, [[-0.2, 2, None]]],
        "output_top_logprobs": [[[-0.5, 9, None]]],
    }
    texts = {token: f"t{token}" for token in range(10)}
    named = logprob_lists(Logprobs(ids=(7, 3)), collected, [5, 6, 7], texts, scoring=False)
    assert named["output_token_ids_logprobs"] == [[[-1.0, 7, "t7"], [None, 3, "t3"]]]


SPANS = [{"version": "1", "start": 0, "end": 2}, {"version": "2", "start": 2, "end": 3}]


def with_versions(versions: Any, tokens: list[int], **fields: Any) -> Collected:
    choice = {"token_ids": tokens, "text": "", "finish_reason": "length", "weight_versions": versions} | fields
    collected = Collected()
    collected.add_answer({"choices": [choice], "usage": {"prompt_tokens": 1}}, logprobs=False, prompt=None)
    return collected


def test_versions_of_tokens_are_read_whole_and_streamed() -> None:
    assert with_versions(SPANS, [4, 5, 6]).versions == SPANS
    streamed = Collected()
    for choice in (
        {"token_ids": [4, 5], "finish_reason": None},
        {"token_ids": [6], "finish_reason": "stop", "weight_versions": SPANS},
    ):
        streamed.add_chunk({"choices": [choice]}, logprobs=False)
    assert streamed.versions == SPANS


def test_a_vllm_that_does_not_tell_versions_is_no_error() -> None:
    assert with_versions(None, [4]).versions is None
    assert with_versions([], [], finish_reason="abort").versions is None


@pytest.mark.parametrize(
    "wrong",
    [
        [{"version": "1", "start": 0, "end": 2}],
        [{"version": "1", "start": 0, "end": 4}],
        [{"version": "1", "start": 1, "end": 3}],
        [{"version": "1", "start": 0, "end": 1}, {"version": "2", "start": 2, "end": 3}],
        [{"version": "1", "start": 0, "end": 2}, {"version": "2", "start": 1, "end": 3}],
        [{"version": "1", "start": 0, "end": 0}, {"version": "2", "start": 0, "end": 3}],
        [{"version": 1, "start": 0, "end": 3}],
        [{"version": "1", "start": False, "end": 3}],
        [{"version": "1", "start": 0, "end": 3.0}],
        [{"version": "1", "start": 0}],
        [3],
        3,
        {"version": "1", "start": 0, "end": 3},
    ],
)
def test_versions_that_do_not_cover_each_token_once_are_an_error(wrong: Any) -> None:
    with pytest.raises(VllmBroke, match="weight_versions"):
        with_versions(wrong, [4, 5, 6])


def test_impossible_alternatives_are_left_out() -> None:
    collected = Collected()
    top = {"token_id:8": -0.5, "token_id:9": -9999.0, "token_id:7": None}
    choice = {
        "text": "a",
        "token_ids": [8],
        "finish_reason": "length",
        "logprobs": {"token_logprobs": [-0.5], "top_logprobs": [top]},
    }
    collected.add_chunk({"choices": [choice]}, logprobs=True)
    assert collected.alternatives == [[(-0.5, 8)]]


@pytest.mark.parametrize(("prompt", "given", "expected"), [(3, {}, 96), (99, {}, 1), (50, {"max_new_tokens": 49}, 49)])
def test_only_the_default_number_of_tokens_is_shortened(prompt: int, given: dict[str, int], expected: int) -> None:
    assert new_tokens(read(given), prompt, 100) == expected


@pytest.mark.parametrize(("prompt", "given"), [(100, {}), (100, {"max_new_tokens": 0}), (50, {"max_new_tokens": 50})])
def test_what_does_not_fit_is_refused(prompt: int, given: dict[str, int]) -> None:
    with pytest.raises(BadRequest, match="context length"):
        new_tokens(read(given), prompt, 100)


def test_scoring_may_fill_the_context_but_one() -> None:
    assert new_tokens(read({"max_new_tokens": 0}), 99, 100) == 0


def read(sampling: dict[str, int]) -> Any:
    return read_generate(json.dumps({"input_ids": [1], "sampling_params": sampling}).encode()).prompts[0]


def test_rows_of_experts_after_the_kept_ones_are_cut() -> None:
    import io

    buffer = io.BytesIO()
    np.save(buffer, np.arange(12, dtype=np.uint8).reshape(3, 2, 2))
    encoded = base64.b64encode(buffer.getvalue()).decode()
    read = np.frombuffer(base64.b64decode(to_int32(encoded, 3, 2)), "<i4")
    assert read.tolist() == list(range(8))
    with pytest.raises(VllmBroke):
        to_int32(encoded, 2, 2)


def test_kept_tokens_are_the_possible_alternatives_and_the_sampled_token() -> None:
    collected = Collected(tokens=[4, 2], alternatives=[[(-0.1, 9), (-2.0, 4)], [(-0.0, 2)]])
    told = kept_tokens(collected, 3)
    ids, ends = (
        np.frombuffer(base64.b64decode(told[f"top_p_token_{name}"]), "<i4").tolist() for name in ("ids", "offsets")
    )
    assert (ids, ends) == ([4, 9, 2], [0, 2, 3])
    assert kept_tokens(Collected(), 3) == {}, "as slime's SGLang"
    with pytest.raises(VllmBroke, match="at token 0 the logits of 2 or more tokens equal the least one"):
        kept_tokens(collected, 2)
