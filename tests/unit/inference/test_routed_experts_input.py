"""From the answers of `/generate` to the loss input `routed_experts`."""

from __future__ import annotations

import asyncio
import base64
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from skyrl.rollout import PlainStrategy, RolloutAnswer, RolloutRequest, SamplingParams, Trajectory
from skyrl.rollout.errors import BadAnswer
from skyrl.rollout.messages import NOTHING
from skyrl.rollout.routed_experts import routed_experts_input
from skyrl.trainer.protocol import Datum, Mixture, TrainingPass
from skyrl.trainer.rows.prefixes import experts_of
from skyrl.trainer.rows.routed_experts import check_routed_experts, with_sorted_experts

TOKENS = list(range(10, 22))


def rows(seed: int, count: int, experts: int = 8) -> np.ndarray:
    """int32 [count, 3, 2]."""
    rng = np.random.default_rng(seed)
    return rng.permuted(np.tile(np.arange(experts), (count, 3, 1)), axis=-1)[..., :2].astype(np.int32)


def answer(prompt: int, record: np.ndarray | None, sampled: list[int], **meta: Any) -> dict[str, Any]:
    found = {"prompt_tokens": prompt, "completion_tokens": len(sampled)} | meta
    if record is not None:
        found["routed_experts"] = base64.b64encode(record.astype("<i4").tobytes()).decode()
    return {"output_ids": sampled, "meta_info": found}


@pytest.mark.parametrize(("experts", "columns"), [(8, 1), (255, 1), (256, 2), (512, 2)])
def test_the_trainer_reads_what_the_sampler_recorded(experts: int, columns: int) -> None:
    record = rows(1, 11, experts)
    packed = routed_experts_input([answer(5, record, TOKENS[5:])], TOKENS, experts=experts)
    assert (packed.dtype, packed.shape) == (np.int64, (11, columns))
    datum = Datum(np.asarray(TOKENS[:-1]), {"routed_experts": packed})
    mixture = Mixture(3, experts, 2)
    check_routed_experts(datum, mixture)
    (read,) = experts_of(with_sorted_experts(TrainingPass("m", [datum], "cross_entropy"), mixture).data) or []
    np.testing.assert_array_equal(read.reshape(11, 3, 2), np.sort(record, axis=-1))
    plain = routed_experts_input([answer(5, record, TOKENS[5:])], TOKENS, per_token=2)
    assert plain.dtype == np.int64
    np.testing.assert_array_equal(plain, record)


def test_a_row_comes_from_the_answer_that_sampled_with_it_and_gaps_are_unrecorded() -> None:
    first, second = rows(1, 5), rows(2, 8)
    parts = [
        answer(3, first, TOKENS[3:6]),
        answer(6, second, TOKENS[6:9]),
        answer(9, None, TOKENS[9:10]),  # aborted: its record is lost
    ]
    found = routed_experts_input(parts, TOKENS, per_token=2)
    np.testing.assert_array_equal(found[:5], first)
    np.testing.assert_array_equal(found[5:8], second[5:])
    assert (found[8:] == -1).all()
    assert (routed_experts_input(parts, TOKENS).view(np.uint8).reshape(11, 8)[8:, :6] == 255).all()


def test_rows_that_were_not_asked_for_are_unrecorded() -> None:
    late = answer(5, rows(1, 7), TOKENS[5:], routed_experts_start_len=4)
    found = routed_experts_input([late], TOKENS, per_token=2)
    assert (found[:4] == -1).all()
    np.testing.assert_array_equal(found[4:], rows(1, 7))


def test_a_sequence_may_end_before_the_sample_does() -> None:
    """For example without the end token."""
    found = routed_experts_input([answer(5, rows(1, 11), TOKENS[5:])], TOKENS[:-1], per_token=2)
    np.testing.assert_array_equal(found, rows(1, 11)[:10])
    other_end = [*TOKENS[:-1], 99, 98]
    found = routed_experts_input([answer(5, rows(1, 11), TOKENS[5:])], other_end, per_token=2)
    assert (found[11:] == -1).all()
    assert (found[:11] == rows(1, 11)).all()


def test_an_answer_of_another_sequence_is_refused() -> None:
    with pytest.raises(ValueError, match=r"answers\[0\]: its sample is not what the sequence has from token 5 on"):
        routed_experts_input([answer(5, rows(1, 11), TOKENS[5:])], [*TOKENS[:7], 99, *TOKENS[8:]])


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (rows(1, 10), "60 numbers for 11 tokens"),
        (rows(1, 0), "0 numbers for 11 tokens"),
    ],
)
def test_a_record_that_does_not_fit_is_refused(record: np.ndarray, words: str) -> None:
    with pytest.raises(BadAnswer, match=rf"answers\[0\]: routed_experts has {words}"):
        routed_experts_input([answer(5, record, TOKENS[5:])], TOKENS)


@pytest.mark.parametrize("count", ["prompt_tokens", "completion_tokens"])
def test_an_answer_without_a_count_is_refused(count: str) -> None:
    without = answer(5, rows(1, 11), TOKENS[5:])
    del without["meta_info"][count]
    with pytest.raises(BadAnswer, match=rf"answers\[0\]: meta_info has routed_experts, but no {count}"):
        routed_experts_input([without], TOKENS)


def test_a_number_below_unrecorded_is_refused() -> None:
    record = rows(1, 11)
    record[3, 1, 0] = -2
    with pytest.raises(BadAnswer, match=r"answers\[0\]: routed_experts has the number -2"):
        routed_experts_input([answer(5, record, TOKENS[5:])], TOKENS)


def test_a_sequence_of_one_token_has_no_rows() -> None:
    record = answer(1, rows(1, 4), TOKENS[1:5])
    assert routed_experts_input([record], TOKENS[:1], per_token=2).shape == (0, 3, 2)
    assert routed_experts_input([record], TOKENS[:1]).shape == (0, 1)


def test_no_record_at_all_and_experts_too_many_to_pack_are_refused() -> None:
    with pytest.raises(ValueError, match="ask for them with return_routed_experts"):
        routed_experts_input([answer(5, None, TOKENS[5:])], TOKENS)
    many = np.full((11, 3, 2), 255)
    with pytest.raises(ValueError, match="experts: 255, and expert 255 was used"):
        routed_experts_input([answer(5, many, TOKENS[5:])], TOKENS)
    assert routed_experts_input([answer(5, many, TOKENS[5:])], TOKENS, per_token=2).max() == 255
    packed = routed_experts_input([answer(5, many - 1, TOKENS[5:])], TOKENS)
    assert (packed.view(np.uint8)[:, :6] == 254).all()


class Client:
    """Answers with one token, and notes the requests."""

    def __init__(self) -> None:
        self.asked: list[RolloutRequest] = []

    async def generate(self, request: RolloutRequest, *, begun: str = "") -> RolloutAnswer:
        self.asked.append(request)
        return replace(NOTHING, tokens=(7,), logprobs=(-0.5,), parts=({"turn": len(self.asked)},))


@pytest.mark.parametrize("wanted", [True, False])
def test_a_trajectory_keeps_the_answers_of_its_turns_if_it_wants_experts(wanted: bool) -> None:
    client: Any = Client()
    trajectory = Trajectory(return_routed_experts=wanted)
    for _ in range(2):
        asyncio.run(PlainStrategy(client).turn(trajectory, [1, 2], SamplingParams()))
    assert [request.return_routed_experts for request in client.asked] == [wanted, wanted]
    assert trajectory.parts == ([{"turn": 1}, {"turn": 2}] if wanted else [])
