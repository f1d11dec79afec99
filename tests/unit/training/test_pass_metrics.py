"""The sums of a pass: which numbers they are, to the last bit, and how often they wait for the device."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from skyrl.training.backends.torch_lora.losses import LossValue
from skyrl.training.backends.torch_lora.metrics import Tally


class _Reads(TorchDispatchMode):
    """Counts the operations that wait for the device."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
        return func(*args, **(kwargs or {}))


def _value(seed: int, *, clips: bool) -> tuple[LossValue, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    log_ratio, advantages = torch.randn(2, 1001, generator=generator)
    advantages[advantages < 0.3] = 0
    clipped = log_ratio > 0.2 if clips else None
    return LossValue((log_ratio.exp() * advantages).sum(), log_ratio * 9, clipped), advantages


def _added(numbers: Iterable[float]) -> float:
    """One after the other: `sum` rounds otherwise since Python 3.12."""
    return functools.reduce(operator.add, numbers, 0.0)


@pytest.mark.parametrize("clips", [False, True])
def test_the_sums_are_those_of_the_chosen_entries_to_the_last_bit(clips: bool) -> None:
    tally, reads = Tally(), _Reads()
    values = [_value(seed, clips=clips) for seed in range(3)]
    with reads:
        for value, advantages in values:
            tally.add(value, 5, 4, advantages)
    assert reads.count <= 3 * 2
    chosen = [(value, advantages != 0) for value, advantages in values]
    logs = [value.log_ratio[mask] for value, mask in chosen if value.log_ratio is not None]
    ratios = [each.clamp(max=20.0).exp() for each in logs]
    assert (tally.tokens, tally.rows) == (15, 12)
    assert tally.loss == _added(float(value.total) for value, _ in values)
    assert tally.active == sum(map(len, logs))
    assert tally.ratio == _added(float(ratio.sum()) for ratio in ratios)
    assert tally.ratio_max == max(float(ratio.max()) for ratio in ratios)
    assert tally.kl == -_added(float(each.sum()) for each in logs)
    counts = [int(value.clipped[mask].sum()) for value, mask in chosen if value.clipped is not None]
    assert tally.clipped == (sum(counts) if clips else None)


def test_entries_without_advantages_count_for_the_loss_alone() -> None:
    tally = Tally()
    value, advantages = _value(0, clips=True)
    tally.add(value, 5, 5, torch.zeros_like(advantages))
    assert tally == Tally(loss=float(value.total), tokens=5, rows=5, clipped=0.0)
    tally.add(LossValue(torch.tensor(2.0)), 1, 1, None)
    assert tally.loss == float(value.total) + 2
