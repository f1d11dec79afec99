"""Losses without a model. The sums of a pass are the chosen entries' to the last bit. Losses of several passes computed
at once are those of each pass alone: logprobs and gradients to the last bit, sums up to rounding."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch_lora_support import rl, sft

from skyrl.base.pictures.picture import PlacedPicture
from skyrl.base.types.weights import LoraSpec
from skyrl.trainer.lora.adapter import Adapter
from skyrl.trainer.losses import LOSSES, Loss, LossInputs, LossValue
from skyrl.trainer.passes.micro_batch import losses_of
from skyrl.trainer.passes.pass_run import MicroBatchItem, PartScore, SinglePassRun
from skyrl.trainer.passes.scores import Scores
from skyrl.trainer.protocol import Datum, TrainingPass
from skyrl.trainer.tally import Tally

CPU = torch.device("cpu")


def slice_of(data: Sequence[Datum], loss: Loss | str, *, rows: int = 1, **config: float) -> MicroBatchItem:
    """All sequences of a pass of one item. A loss is one of `LOSSES`, or the test's own."""
    adapter = Adapter(LoraSpec(8, 8.0, seed=0), [], CPU, drawn=False)
    training_pass = TrainingPass("m", data, loss if isinstance(loss, str) else "own", config)
    running = SinglePassRun(adapter, training_pass, LOSSES[loss] if isinstance(loss, str) else loss)
    return MicroBatchItem(running, range(len(data)), rows)


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


def _entries(piece: MicroBatchItem) -> int:
    return sum(part.entries for part in piece.parts)


def _logprobs(slices: Sequence[MicroBatchItem]) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return -5 + torch.randn(sum(_entries(piece) for piece in slices), generator=generator)


def _scored(slices: Sequence[MicroBatchItem], logprobs: Tensor, *, joined: bool) -> tuple[list[PartScore], Tensor]:
    scores = Scores.of(losses_of(slices, CPU, joined=joined), logprobs, backward=True)
    assert scores.gradient is not None
    return scores.sent().read(), scores.gradient


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
        stop = start + _entries(piece)
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
def test_a_sum_beyond_float32_is_infinite(joined: bool) -> None:
    """Also where it was computed in float64."""
    data = sft(0, 4)
    data[0].loss_inputs["weights"] = np.full(4, 1e38, np.float32)
    slices = [slice_of(data, "cross_entropy"), slice_of(sft(1, 4), "cross_entropy")]
    (bad, good), _ = _scored(slices, torch.full((8,), -1.0), joined=joined)
    assert bad.tally.loss == math.inf
    assert math.isfinite(good.tally.loss)


ENTRIES = 1001


class _Reads(TorchDispatchMode):
    """Counts the operations that wait for the device."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
        return func(*args, **(kwargs or {}))


def _clipping(lp: Tensor, inputs: LossInputs, config: object) -> LossValue:
    return LossValue(lp.exp() * inputs["advantages"], lp * 9, lp > 0.2)


def _plain(lp: Tensor, inputs: LossInputs, config: object) -> LossValue:
    return replace(_clipping(lp, inputs, config), clipped=None)


def _slice(seed: int, *, clips: bool) -> tuple[MicroBatchItem, Tensor]:
    """A slice of one sequence, whose chosen entries have advantages; and logprobs."""
    generator = torch.Generator().manual_seed(seed)
    lp, advantages = torch.randn(2, ENTRIES, generator=generator)
    advantages[advantages < 0.3] = 0
    tokens = np.zeros(ENTRIES, np.int64)
    datum = Datum(tokens, {"target_tokens": tokens, "advantages": advantages.numpy()})
    return slice_of([datum], Loss(_clipping if clips else _plain, ("advantages",)), rows=4), lp


def _tally(piece: MicroBatchItem, lp: Tensor) -> Tally:
    scores = Scores.of(losses_of([piece], CPU, joined=False), lp, backward=False)
    return scores.sent().read()[0].tally


def _added(numbers: Iterable[float]) -> float:
    """One after the other: `sum` rounds otherwise since Python 3.12."""
    return functools.reduce(operator.add, numbers, 0.0)


@pytest.mark.parametrize("clips", [False, True])
def test_the_sums_are_those_of_the_chosen_entries_to_the_last_bit(clips: bool) -> None:
    tally, reads = Tally(), _Reads()
    slices = [_slice(seed, clips=clips) for seed in range(3)]
    with reads:
        for each in slices:
            tally.add_all(_tally(*each))
    assert reads.count == 0
    given = [(lp, torch.from_numpy(piece.data[0].loss_inputs["advantages"])) for piece, lp in slices]
    chosen = [(lp, advantages, advantages != 0) for lp, advantages in given]
    logs = [(lp * 9)[mask] for lp, _, mask in chosen]
    ratios = [each.clamp(max=20.0).exp() for each in logs]
    assert (tally.tokens, tally.rows) == (3 * ENTRIES, 12)
    assert tally.loss == _added(float((lp.exp() * advantages).sum()) for lp, advantages, _ in chosen)
    assert tally.active == sum(map(len, logs))
    assert tally.ratio == _added(float(ratio.sum()) for ratio in ratios)
    assert tally.ratio_max == max(float(ratio.max()) for ratio in ratios)
    assert tally.kl == -_added(float(each.sum()) for each in logs)
    assert tally.clipped == (sum(int((lp > 0.2)[mask].sum()) for lp, _, mask in chosen) if clips else None)


def test_entries_without_advantages_count_for_the_loss_slice_of() -> None:
    piece, lp = _slice(0, clips=True)
    (datum,) = piece.data
    weightless = Datum(datum.tokens, {**datum.loss_inputs, "advantages": np.zeros(ENTRIES, np.float32)})
    loss = Loss(lambda lp, inputs, config: LossValue(lp, lp * 9, lp > 0.2), ("advantages",))
    tally = _tally(slice_of([weightless], loss, rows=5), lp)
    assert tally == Tally(float(lp.sum()), ENTRIES, 5, active=0, clipped=0.0)
    metrics = tally.metrics()
    assert {metrics[f"{name}:sum"] for name in ("active_tokens", "ratio", "kl", "clipped")} == {0.0}
    assert not {"ratio:mean", "ratio:max", "kl:mean", "clip_fraction:mean"} & metrics.keys()


@pytest.mark.parametrize(("weights", "total"), [([0.0, 0.5, 1.0], 1.5), (None, 3.0), ([0.5, -0.25, 1.0], None)])
def test_the_sum_of_weights_is_said_unless_one_is_negative(weights: list[float] | None, total: float | None) -> None:
    tokens = np.zeros(3, np.int64)
    given = {} if weights is None else {"weights": np.array(weights, np.float32)}
    tally = _tally(
        slice_of([Datum(tokens, {"target_tokens": tokens} | given)], LOSSES["cross_entropy"], rows=3), -torch.ones(3)
    )
    tally.add_all(Tally())
    assert tally.metrics().get("weights:sum") == total
