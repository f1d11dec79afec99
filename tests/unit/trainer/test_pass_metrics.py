"""The sums of a pass: which numbers they are, to the last bit, and how often they wait for the device."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from loss_support import CPU, slice_of
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from skyrl.trainer.losses import LOSSES, Loss, LossInputs, LossValue, Tally
from skyrl.trainer.passes.micro_batch import Scores, losses_of
from skyrl.trainer.passes.pass_run import MicroBatchItem
from skyrl.trainer.protocol import Datum

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
    return scores.read()[0].tally


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
    assert _tally(slice_of([weightless], loss, rows=5), lp) == Tally(float(lp.sum()), ENTRIES, 5, clipped=0.0)


def test_a_loss_without_ratios_has_no_metrics_of_them() -> None:
    loss = Loss(lambda lp, inputs, config: LossValue(lp))
    piece, lp = _slice(0, clips=True)
    assert _tally(slice_of(piece.data, loss, rows=1), lp) == Tally(float(lp.sum()), ENTRIES, 1)


@pytest.mark.parametrize(("weights", "total"), [([0.0, 0.5, 1.0], 1.5), (None, 3.0), ([0.5, -0.25, 1.0], None)])
def test_the_sum_of_weights_is_said_unless_one_is_negative(weights: list[float] | None, total: float | None) -> None:
    tokens = np.zeros(3, np.int64)
    given = {} if weights is None else {"weights": np.array(weights, np.float32)}
    tally = _tally(
        slice_of([Datum(tokens, {"target_tokens": tokens} | given)], LOSSES["cross_entropy"], rows=3), -torch.ones(3)
    )
    tally.add_all(Tally())
    assert tally.metrics().get("weights:sum") == total


def test_passes_of_one_micro_batch_have_their_own_sums_of_weights() -> None:
    tokens = np.zeros(2, np.int64)
    pieces = [
        slice_of(
            [Datum(tokens, {"target_tokens": tokens, "weights": np.array(each, np.float32)})],
            LOSSES["cross_entropy"],
            rows=2,
        )
        for each in ([0.0, 0.25], [1.0, -1.0], [2.0, 3.0])
    ]
    scores = Scores.of(losses_of(pieces, CPU, joined=True), torch.zeros(6), backward=False)
    found = [score.tally.metrics().get("weights:sum") for score in scores.read()]
    assert found == [0.25, None, 5.0]
