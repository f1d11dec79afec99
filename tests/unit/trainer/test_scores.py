"""Losses of several passes computed at once are those of each pass alone: logprobs and gradients to the last bit, sums
up to rounding. Numbers that are not finite stay with their pass."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from loss_support import CPU, running_pass, slice_of
from torch import Tensor
from torch_lora_support import rl, sft

from benchmarks.operation_counts import Operations
from skyrl.base.pictures.picture import PlacedPicture
from skyrl.trainer.passes.micro_batch import Scores, losses_of
from skyrl.trainer.passes.pass_run import JoinedPasses, MicroBatchItem, PartScore
from skyrl.trainer.protocol import Datum


def _gspo(seed: int) -> list[Datum]:
    data = rl(seed, 9, 13)
    for datum in data:
        datum.loss_inputs["sequence_ratio_mask"] = (datum.loss_inputs["advantages"] != 0).astype(np.float32)
    return data


def _with_picture(datum: Datum) -> Datum:
    """Its tokens 3 to 5 are a picture."""
    return Datum(datum.tokens, datum.loss_inputs, (PlacedPicture(3, 3, "0" * 64, "png"),))


def _mixed() -> list[MicroBatchItem]:
    """Kinds that take turns, two settings of one loss, a pass without advantages, and one with a picture."""
    nothing = rl(6, 8)
    nothing[0].loss_inputs["advantages"][:] = 0
    return [
        slice_of(rl(0, 11, 7), "ppo"),
        slice_of(sft(1, 9), "cross_entropy"),
        slice_of(rl(2, 12), "ppo", clip_low_threshold=0.9),
        slice_of(_gspo(3), "gspo"),
        slice_of(rl(4, 5, 21), "ppo"),
        slice_of(_gspo(5), "gspo"),
        slice_of(nothing, "ppo"),
        slice_of([*sft(7, 4), _with_picture(sft(8, 10)[0])], "cross_entropy"),
        slice_of(rl(9, 14), "dro"),
        slice_of(rl(10, 14), "cispo"),
        slice_of(rl(11, 3), "dro"),
    ]


def _logprobs(slices: Sequence[MicroBatchItem]) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return -5 + torch.randn(sum(piece.entries for piece in slices), generator=generator)


def _scored(slices: Sequence[MicroBatchItem], logprobs: Tensor, *, joined: bool) -> tuple[list[PartScore], Tensor]:
    scores = Scores.of(losses_of(slices, CPU, joined=joined), logprobs, backward=True)
    assert scores.gradient is not None
    return scores.read(), scores.gradient


def _assert_same(one: Sequence[PartScore], other: Sequence[PartScore]) -> None:
    for ours, expected in zip(one, other, strict=True):
        assert ours.counts == expected.counts
        for array, of_expected in zip(ours.logprobs, expected.logprobs, strict=True):
            np.testing.assert_array_equal(array, of_expected)
        numbers, of_expected = vars(ours.tally), vars(expected.tally)
        assert numbers["clipped"] == of_expected["clipped"]
        for name in numbers.keys() - {"clipped"}:
            if of_expected[name] is None:  # of a loss without weights
                assert numbers[name] is None, name
                continue
            assert numbers[name] == pytest.approx(of_expected[name], rel=1e-5, abs=1e-5, nan_ok=True), name


def test_losses_computed_at_once_are_those_of_each_pass_alone() -> None:
    slices = _mixed()
    logprobs = _logprobs(slices)
    losses = losses_of(slices, CPU, joined=True)
    assert [len(group.parts) for group in losses.groups] == [3, 2, 1, 2, 2, 1]
    (ours, gradient), (expected, of_expected) = (_scored(slices, logprobs, joined=joined) for joined in (True, False))
    _assert_same(ours, expected)
    assert torch.equal(gradient, of_expected)
    start = 0
    for piece, score in zip(slices, expected, strict=True):
        stop = start + piece.entries
        (own,), of_own = _scored([piece], logprobs[start:stop], joined=False)
        assert own.tally == score.tally
        assert torch.equal(of_own, gradient[start:stop])
        start = stop


def test_a_target_that_is_a_token_of_a_picture_has_a_logprob_and_no_loss() -> None:
    data = sft(8, 10)
    for datum in data:
        datum.loss_inputs["weights"] = np.ones(10, np.float32)
    slices = [slice_of([_with_picture(data[0])], "cross_entropy"), slice_of(sft(1, 4), "cross_entropy")]
    logprobs = _logprobs(slices)
    (first, _), gradient = _scored(slices, logprobs, joined=True)
    np.testing.assert_array_equal(first.logprobs[0], logprobs[:10].numpy())
    assert gradient[:10].tolist() == [-1, -1, 0, 0, 0, -1, -1, -1, -1, -1]
    assert first.tally.loss == pytest.approx(-float(logprobs[:10].sum() - logprobs[2:5].sum()))


def _spoilt(place: int, value: float) -> list[Datum]:
    data = rl(place, 6, 8)
    data[-1].loss_inputs["advantages"][-1] = value
    return data


@pytest.mark.parametrize("joined", [True, False])
def test_a_pass_that_is_not_finite_changes_no_neighbour(joined: bool) -> None:
    passes = [rl(0, 6, 8), _spoilt(1, math.inf), rl(2, 6, 8)]
    slices = [slice_of(data, "importance_sampling") for data in passes]
    logprobs = _logprobs(slices)
    (first, bad, last), gradient = _scored(slices, logprobs, joined=joined)
    assert math.isinf(bad.tally.loss)
    assert all(score.counts for score in (first, bad, last)), "each has a gradient of its own"
    good, of_good = _scored([slices[0], slices[2]], torch.cat([logprobs[:14], logprobs[28:]]), joined=joined)
    _assert_same([first, last], good)
    assert torch.equal(torch.cat([gradient[:14], gradient[28:]]), of_good)
    assert not gradient[14:28].isfinite().all()


@pytest.mark.parametrize("joined", [True, False])
@pytest.mark.parametrize("spoilt", [0, 1, 2])
def test_a_joined_pass_that_is_not_finite_has_no_part_in_the_gradient(joined: bool, spoilt: int) -> None:
    passes = [rl(number, 6, 8) if number != spoilt else _spoilt(number, math.inf) for number in range(3)]
    members = [running_pass(data, "importance_sampling") for data in passes]
    running = JoinedPasses(members[0].model, members)
    slices = [MicroBatchItem(running, range(6), 42), slice_of(rl(4, 5), "importance_sampling")]
    logprobs = _logprobs(slices)
    scores, gradient = _scored(slices, logprobs, joined=joined)
    assert [score.counts for score in scores] == [*(number != spoilt for number in range(3)), True]
    own = slice(14 * spoilt, 14 * spoilt + 14)
    assert not gradient[own].any()
    alone, of_alone = _scored([slice_of(data, "importance_sampling") for data in passes], logprobs[:42], joined=False)
    left = torch.ones(42, dtype=torch.bool)
    left[own] = False
    assert torch.equal(gradient[:42][left], of_alone[left])
    for number in {0, 1, 2} - {spoilt}:
        assert scores[number].tally.loss == pytest.approx(alone[number].tally.loss, rel=1e-5)


@pytest.mark.parametrize("joined", [True, False])
def test_a_sum_beyond_float32_is_infinite(joined: bool) -> None:
    """Also where it was computed in float64."""
    data = sft(0, 4)
    data[0].loss_inputs["weights"] = np.full(4, 1e38, np.float32)
    slices = [slice_of(data, "cross_entropy"), slice_of(sft(1, 4), "cross_entropy")]
    (bad, good), _ = _scored(slices, torch.full((8,), -1.0), joined=joined)
    assert bad.tally.loss == math.inf
    assert math.isfinite(good.tally.loss)


def _operations(slices: Sequence[MicroBatchItem]) -> tuple[int, int, int]:
    """Operations, uploads and waits of the losses of a micro-batch."""
    logprobs = _logprobs(slices)
    with Operations() as operations:
        Scores.of(losses_of(slices, CPU, joined=True), logprobs, backward=True).read()
    totals = operations.totals()
    return totals["other"], totals["uploads"], totals["waits"]


@pytest.mark.parametrize("loss", ["cross_entropy", "ppo", "gspo"])
def test_losses_of_many_passes_take_one_upload_and_one_wait_and_hardly_more_operations(loss: str) -> None:
    def make(count: int) -> list[MicroBatchItem]:
        return [slice_of(_gspo(number) if loss != "cross_entropy" else sft(number, 9), loss) for number in range(count)]

    one, eight, many = (_operations(make(count)) for count in (1, 8, 20))
    assert one[1:] == eight[1:] == many[1:] == (1, 1)
    assert many[0] == eight[0] <= 1.3 * one[0]
