"""The products of adapters and experts against plain operations: linear layers with adapters on slices of their rows,
stacks of adapters, and grouped products of experts. test_random_passes has whole passes with them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from skyrl.base.types.weights import LoraSpec
from skyrl.trainer.experts.product import BaseExperts, ExpertsUpdate, experts_with_updates, gated, of_used_experts
from skyrl.trainer.lora.adapter import Adapter, Target
from skyrl.trainer.lora.linear import LoraSegment, linear_with_updates
from skyrl.trainer.lora.products import RowsUpdate
from skyrl.trainer.lora.stack import AdapterStack
from skyrl.trainer.ranks.lora_rank import MOST_PADDING, groups_of

PLACES = ((0, 3, 4, 8.0), (3, 4, 1, 0.5), (6, 11, 8, 4.0))
"""First row, last row + 1, rank, scale. Rows 4 and 5 have no adapter."""
COUNT, INS, OUTS = 11, 12, 20


def _inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, list[RowsUpdate]]:
    torch.manual_seed(0)
    updates = [
        RowsUpdate(first, last, scale, *(torch.randn(shape).requires_grad_() for shape in ((rank, INS), (OUTS, rank))))
        for first, last, rank, scale in PLACES
    ]
    if dtype == torch.float64:
        updates = [each._replace(lora_a=each.lora_a.double(), lora_b=each.lora_b.double()) for each in updates]
    x, weight, bias = torch.randn(1, COUNT, INS), torch.randn(OUTS, INS), torch.randn(OUTS)
    return x.to(dtype).requires_grad_(), weight.to(dtype), bias.to(dtype), updates


def _plain(x: Tensor, weight: Tensor, bias: Tensor | None, updates: list[RowsUpdate]) -> Tensor:
    y = torch.nn.functional.linear(x, weight, bias)
    parts = [torch.zeros_like(y) for _ in updates]
    for part, (start, stop, scale, lora_a, lora_b) in zip(parts, updates, strict=True):
        part[:, start:stop] = scale * (x[:, start:stop] @ lora_a.to(x.dtype).t()) @ lora_b.to(x.dtype).t()
    return y + sum(parts)


def _all(x: Tensor, updates: list[RowsUpdate]) -> list[Tensor]:
    return [x, *(matrix for each in updates for matrix in (each.lora_a, each.lora_b))]


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("count", [1, 3])
def test_results_and_gradients_are_those_of_plain_operations(with_bias: bool, count: int) -> None:
    x, weight, bias, updates = _inputs()
    updates = updates[:count]
    given = bias if with_bias else None
    results = [function(x, weight, given, updates) for function in (linear_with_updates, _plain)]
    torch.testing.assert_close(*results)
    ours, theirs = (torch.autograd.grad(result.sin().sum(), _all(x, updates)) for result in results)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)


def test_an_input_without_gradient_gets_none_and_adapters_get_theirs() -> None:
    x, weight, _, updates = _inputs()
    y = linear_with_updates(x.detach(), weight, None, updates)
    gradients = torch.autograd.grad(y.sum(), _all(x, updates), allow_unused=True)
    assert gradients[0] is None
    assert all(gradient is not None for gradient in gradients[1:])


def test_float32_adapters_of_a_bfloat16_layer_get_float32_gradients() -> None:
    x, weight, _, updates = _inputs(torch.bfloat16)
    y = linear_with_updates(x, weight, None, updates)
    assert y.dtype == torch.bfloat16
    gradients = torch.autograd.grad(y.float().sum(), _all(x, updates))
    assert [gradient.dtype for gradient in gradients] == [torch.bfloat16, *[torch.float32] * 6]


def test_the_input_and_the_low_rank_rows_are_all_that_is_kept() -> None:
    x, weight, _, updates = _inputs()
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: (kept.append(tensor), tensor)[1], lambda each: each):
        linear_with_updates(x, weight, None, updates)
    known = {id(tensor) for tensor in (x, weight, *_all(x, updates))}
    shapes = [tuple(tensor.shape) for tensor in kept if id(tensor) not in known and tensor.shape != weight.shape]
    low_rank = [(last - first, rank) for first, last, rank, _ in PLACES]
    assert [shape for shape in shapes if shape in low_rank] == low_rank
    assert (COUNT, OUTS) not in [shape[-2:] for shape in shapes], "not the result"


CPU = torch.device("cpu")
WIDTHS = (48, 96, 32, 48)
"""Three layers, one after the other."""
TARGETS = [Target(f"layer{number}", *WIDTHS[number : number + 2]) for number in range(3)]
RANKS = (8, 16, 32, 64, 8, 4, 64, 16)
LAYERS = ((0, 1, 2), (0, 1, 2), (0, 2), (0, 1, 2), (1,), (0, 1, 2), (1, 2), (2,))
"""Of each adapter."""


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


def test_adapters_of_several_ranks_are_updated_alone_and_each_layer_is_scaled_by_its_own() -> None:
    first, *_ = TARGETS
    own, same = (
        Adapter(LoraSpec(8, 16.0, 0, rank_pattern=((re.escape(first.name), rank),)), TARGETS, CPU) for rank in (2, 8)
    )
    assert groups_of([own, *_of_ranks(8), same, own]) == [None, 0, 0, None]
    segment = LoraSegment.of(0, 4, own, own.leaves(False))
    updates = [segment.update(target.name) for target in TARGETS]
    assert [update.scale for update in updates if isinstance(update, RowsUpdate)] == [8.0, *[2.0] * (len(TARGETS) - 1)]


TOKENS, PER_ROW, EXPERTS, HIDDEN, SIZE = 256, 4, 8, 64, 32
PROJECTIONS = ((HIDDEN, SIZE), (HIDDEN, SIZE), (SIZE, HIDDEN))
SCALES = (0.5, 0.5, 0.5)


@pytest.fixture
def four_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


def _drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.3


def _gradients(*, adapted: bool) -> list[Tensor]:
    """Of the rows, the base model's matrices, and an adapter's."""
    hidden = _drawn(TOKENS, HIDDEN, seed=0).requires_grad_()
    base = [_drawn(EXPERTS, 2 * SIZE, HIDDEN, seed=1), _drawn(EXPERTS, HIDDEN, SIZE, seed=2)]
    pairs = [(_drawn(EXPERTS, 3, i, seed=3), _drawn(EXPERTS, o, 3, seed=4)) for i, o in PROJECTIONS]
    adapters = [each for pair in pairs for each in pair] if adapted else []
    leaves = [matrix.requires_grad_() for matrix in (*base, *adapters)]
    weights, chosen = _drawn(TOKENS, EXPERTS, seed=5).softmax(-1).topk(PER_ROW)
    updates = [ExpertsUpdate(0, TOKENS, SCALES, pairs[:2], pairs[2])] if adapted else []
    made = experts_with_updates(hidden, chosen, weights, BaseExperts(base[0], base[1], gated(silu), 2), updates)
    return list(torch.autograd.grad(made.square().sum(), [hidden, *leaves]))


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.usefixtures("four_threads")
def test_gradients_are_the_same_bits_in_each_run_with_several_threads(adapted: bool) -> None:
    first = _gradients(adapted=adapted)
    for _ in range(8):
        assert all(map(torch.equal, _gradients(adapted=adapted), first))


def test_experts_without_rows_get_a_gradient_of_zero_whatever_the_kernel_left_there() -> None:
    gradient = torch.ones(4, 2, 3)
    gradient[0] = gradient[2] = torch.nan
    found = of_used_experts(gradient, torch.tensor([0, 2, 2, 5], dtype=torch.int32))
    assert [one.unique().tolist() for one in found] == [[0], [1], [0], [1]]


def test_the_backward_keeps_an_adapters_matrices_as_they_are_and_no_copies_in_bfloat16() -> None:
    pairs = [(_drawn(EXPERTS, 8, i, seed=3), _drawn(EXPERTS, o, 8, seed=4)) for i, o in PROJECTIONS]
    leaves = [matrix.requires_grad_() for pair in pairs for matrix in pair]
    gate_up, down = _drawn(EXPERTS, 2 * SIZE, HIDDEN, seed=1), _drawn(EXPERTS, HIDDEN, SIZE, seed=2)
    base = BaseExperts(gate_up.bfloat16(), down.bfloat16(), gated(silu), 2)
    weights, chosen = _drawn(TOKENS, EXPERTS, seed=5).bfloat16().softmax(-1).topk(PER_ROW)
    kept: set[int] = set()

    def keep(tensor: Tensor) -> Tensor:
        if tensor.ndim == 3:
            kept.add(tensor.untyped_storage().data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden = _drawn(TOKENS, HIDDEN, seed=0).bfloat16().requires_grad_()
        experts_with_updates(hidden, chosen, weights, base, [ExpertsUpdate(0, TOKENS, SCALES, pairs[:2], pairs[2])])
    assert kept == {matrix.untyped_storage().data_ptr() for matrix in (*leaves, base.first, base.down)}
