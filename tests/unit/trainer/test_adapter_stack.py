"""Adapters of several ranks and layers in one stack compute what each computes alone. Each gets its gradient."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from skyrl.base.types.weights import LoraSpec
from skyrl.trainer.lora.adapter import Adapter, LoraPair, Target
from skyrl.trainer.lora.linear import AdapterStack, RowsUpdate, StackedUpdate, Update, linear_with_updates
from skyrl.trainer.ranks.lora_rank import MOST_PADDING, groups_of

CPU = torch.device("cpu")
WIDTHS = (48, 96, 32, 48)
"""Three layers, one after the other."""
TARGETS = [Target(f"layer{number}", *WIDTHS[number : number + 2]) for number in range(3)]
RANKS = (8, 16, 32, 64, 8, 4, 64, 16)
LAYERS = ((0, 1, 2), (0, 1, 2), (0, 2), (0, 1, 2), (1,), (0, 1, 2), (1, 2), (2,))
"""Of each adapter."""
ROWS = (5, 1, 12, 3, 8, 7, 2, 9)
ENDS = torch.tensor([*accumulate(ROWS)], dtype=torch.int32)
SPANS = [*zip([0, *ENDS.tolist()], ENDS.tolist(), strict=False)]

Pairs = Mapping[str, LoraPair]


def _adapters() -> list[Adapter]:
    """With different scales: alphas are 1, 4, 7, ... Their lora_B is not zero."""
    made = [
        Adapter(LoraSpec(rank, 1.0 + 3 * number, number), [TARGETS[layer] for layer in layers], CPU)
        for number, (rank, layers) in enumerate(zip(RANKS, LAYERS, strict=True))
    ]
    generator = torch.Generator().manual_seed(7)
    for adapter in made:
        adapter.weights.add_(0.1 * torch.randn(len(adapter.weights), generator=generator))
    return made


def _inputs() -> tuple[Tensor, list[Tensor]]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(sum(ROWS), WIDTHS[0], generator=generator)
    return x, [torch.randn(t.out_features, t.in_features, generator=generator) / 8 for t in TARGETS]


def _outputs(x: Tensor, weights: Sequence[Tensor], pairs: Pairs, update: Callable[[LoraPair], Update]) -> Tensor:
    for target, weight in zip(TARGETS, weights, strict=True):
        updates = [update(pairs[target.name])] if target.name in pairs else []
        x = torch.tanh(linear_with_updates(x, weight, None, updates))
    return x


def _together(adapters: Sequence[Adapter]) -> tuple[Tensor, list[Tensor]]:
    """Outputs [rows, out_features], and each adapter's gradient."""
    stack = AdapterStack(adapters)
    pairs = stack.leaves(True, torch.float32)
    outputs = _outputs(*_inputs(), pairs, lambda pair: StackedUpdate(0, sum(ROWS), *pair, ENDS))
    leaves = [leaf for pair in pairs.values() for leaf in pair]
    return outputs.detach(), stack.gradients(torch.autograd.grad(outputs.square().sum(), leaves))


def _alone(adapter: Adapter, start: int, stop: int) -> tuple[Tensor, Tensor]:
    pairs = adapter.leaves(True)
    x, weights = _inputs()
    outputs = _outputs(x[start:stop], weights, pairs, lambda pair: RowsUpdate(0, stop - start, adapter.scale, *pair))
    leaves = [leaf for pair in pairs.values() for leaf in pair]
    found = torch.autograd.grad(outputs.square().sum(), leaves)
    return outputs.detach(), torch.cat([gradient.reshape(-1) for gradient in found])


def test_eight_adapters_of_several_ranks_scales_and_layers_have_the_gradients_that_they_have_alone() -> None:
    adapters = _adapters()
    assert len({adapter.scale for adapter in adapters}) == 8
    outputs, gradients = _together(adapters)
    for adapter, gradient, span in zip(adapters, gradients, SPANS, strict=True):
        expected, of_adapter = _alone(adapter, *span)
        torch.testing.assert_close(outputs[slice(*span)], expected, rtol=0, atol=2e-6)
        assert gradient.dtype == torch.float32
        torch.testing.assert_close(gradient, of_adapter, rtol=0, atol=1e-5 * float(of_adapter.abs().max()))


@pytest.mark.parametrize("broken", [0, 3, 5])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_not_finite_do_not_reach_other_adapters(broken: int, value: float) -> None:
    """Neither from an adapter of the highest rank nor from one that is padded: not one bit of the others changes."""
    adapters = _adapters()
    outputs, gradients = _together(adapters)
    adapters[broken].weights.fill_(value)
    beside, found = _together(adapters)
    assert not beside[slice(*SPANS[broken])].isfinite().all()
    for number in (number for number in range(8) if number != broken):
        assert torch.equal(beside[slice(*SPANS[number])], outputs[slice(*SPANS[number])])
        assert torch.equal(found[number], gradients[number])


def test_gradients_of_the_padding_are_dropped() -> None:
    """Also where they are not finite."""
    adapters = _adapters()
    stack = AdapterStack(adapters)
    of_leaves: list[Tensor] = []
    for name, (lora_a, lora_b) in stack.leaves(False, torch.bfloat16).items():
        of_a, of_b = torch.full_like(lora_a, math.nan), torch.full_like(lora_b, math.nan)
        for number, adapter in enumerate(adapters):
            if f"{name}.lora_A" in adapter.shapes:
                of_a[number, : adapter.spec.rank] = 1
                of_b[number, :, : adapter.spec.rank] = 1
        of_leaves += [of_a, of_b]
    for adapter, gradient in zip(adapters, stack.gradients(of_leaves), strict=True):
        assert gradient.dtype == torch.float32
        for name, matrix in adapter.views(gradient).items():
            expected = adapter.scale if name.endswith(".lora_B") else 1.0
            assert torch.equal(matrix, torch.full_like(matrix, expected))


def test_the_matrices_of_a_stack_are_rounded_once() -> None:
    adapters = _adapters()
    leaves = AdapterStack(adapters).leaves(False, torch.bfloat16)
    for number, adapter in enumerate(adapters):
        rank, own = adapter.spec.rank, adapter.leaves(False)
        for name, (of_a, of_b) in leaves.items():
            if name not in own:
                assert not of_a[number].any()
                assert not of_b[number].any()
                continue
            lora_a, lora_b = own[name]
            assert torch.equal(of_a[number, :rank], lora_a.bfloat16())
            assert torch.equal(of_b[number, :, :rank], (adapter.scale * lora_b).bfloat16())
            assert not of_a[number, rank:].any()
            assert not of_b[number, :, rank:].any()


def test_gradients_share_no_memory() -> None:
    """One that waits for its optimizer step does not keep those of the others."""
    _, gradients = _together(_adapters())
    for gradient in gradients:
        assert gradient.untyped_storage().nbytes() == gradient.nbytes


def _of_ranks(*ranks: int, targets: Sequence[Target] = TARGETS) -> list[Adapter]:
    return [Adapter(LoraSpec(rank, 16.0, 0), targets, CPU) for rank in ranks]


def test_ranks_up_to_four_times_the_lowest_are_updated_together() -> None:
    assert groups_of(_of_ranks(32, 4, 16, 8, 1)) == [0, 0, 0, 0, 0]
    assert groups_of(_of_ranks(64, 8, 32, 8, 128)) == [1, 0, 0, 0, 1]


def test_layers_that_are_missing_count_as_padding() -> None:
    without_last = _of_ranks(8, targets=TARGETS[:2])
    assert groups_of([*_of_ranks(8), *without_last]) == [0, 0]
    assert groups_of([*_of_ranks(32), *without_last]) == [1, 0]


def test_no_adapter_becomes_more_than_four_times_as_large() -> None:
    adapters = [adapter for layers in LAYERS for adapter in _of_ranks(*RANKS, targets=[TARGETS[n] for n in layers])]
    groups = groups_of(adapters)
    assert 1 < len({*groups}) < 8, "of 24 ranks and sets of layers"
    for number in {*groups}:
        own = [adapter for adapter, group in zip(adapters, groups, strict=True) if group == number]
        assert AdapterStack(own).row_numel <= MOST_PADDING * min(AdapterStack([each]).row_numel for each in own)


def test_adapters_of_experts_are_updated_alone() -> None:
    of_experts = _of_ranks(8, targets=[Target("experts.down_proj", 16, 16, 4)])
    assert groups_of([*of_experts, *_of_ranks(8), *of_experts]) == [None, 0, None]
