"""From the answers of `/generate` to the loss inputs `top_p_token_ids` and `top_p_token_offsets`."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest

from skyrl.rollout.errors import BadAnswer
from skyrl.rollout.top_p_tokens import top_p_inputs
from skyrl.trainer.protocol import Datum
from skyrl.trainer.rows.sampled_from import SampledFrom, Scorings, check_kept_tokens

TOKENS = [1, 2, 3, 10, 11, 12, 5, 20, 21]


def coded(numbers: list[int]) -> str:
    return base64.b64encode(np.array(numbers, "<i4").tobytes()).decode()


def answer(prompt: int, sampled: list[int], sets: list[list[int]] | None) -> dict[str, Any]:
    meta: dict[str, Any] = {"prompt_tokens": prompt}
    if sets is not None:
        meta["top_p_token_ids"] = coded([token for each in sets for token in each])
        meta["top_p_token_offsets"] = coded([0, *np.cumsum([len(each) for each in sets]).tolist()])
    return {"output_ids": sampled, "meta_info": meta}


def test_the_trainer_reads_what_the_sampler_kept_in_all_turns() -> None:
    """The first turn ends with a token that the next one leaves out; a part without a record was aborted."""
    parts = [
        answer(3, [10, 11, 99], [[10, 4], [11], [99, 98]]),
        answer(5, [12], None),
        answer(7, [20, 21], [[20, 7, 8], [21]]),
    ]
    inputs = top_p_inputs(parts, TOKENS)
    assert inputs["top_p_token_ids"].tolist() == [10, 4, 11, 20, 7, 8, 21]
    assert inputs["top_p_token_offsets"].tolist() == [0, 0, 0, 2, 3, 3, 3, 6, 7]
    datum = Datum(np.array(TOKENS[:-1]), {"target_tokens": np.array(TOKENS[1:]), **inputs})
    check_kept_tokens(datum, SampledFrom(), 30)
    scorings = Scorings.of([(SampledFrom(0.7), datum)])
    assert [scorings.kept[number].tolist() for number in scorings.of_positions[0]] == [
        [], [], [4, 10], [11], [], [], [7, 8, 20], [21],
    ]  # fmt: skip


def test_what_does_not_fit_is_an_error() -> None:
    with pytest.raises(ValueError, match="none has top_p_token_ids"):
        top_p_inputs([answer(3, [10], None)], TOKENS)
    with pytest.raises(ValueError, match=r"answers\[0\]: its sample is not what the sequence has from token 3 on"):
        top_p_inputs([answer(3, [9, 11], [[9], [11]])], TOKENS)
    with pytest.raises(BadAnswer, match="do not divide 1 ids among 2 tokens"):
        top_p_inputs([answer(3, [10, 11], [[10]])], TOKENS)
    broken = answer(3, [10], [[10]])
    broken["meta_info"]["top_p_token_offsets"] = "?"
    with pytest.raises(BadAnswer, match="top_p_token_offsets cannot be read"):
        top_p_inputs([broken], TOKENS)
