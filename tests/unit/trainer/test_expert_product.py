"""The grouped products of experts: the same gradients in each run, and none for experts that no row uses."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from skyrl.trainer.experts.product import (
    BaseExperts,
    ExpertsUpdate,
    _on_device,
    experts_with_updates,
    gated,
    of_used_experts,
)

ROWS, PER_ROW, EXPERTS, HIDDEN, SIZE = 256, 4, 8, 64, 32
PROJECTIONS = ((HIDDEN, SIZE), (HIDDEN, SIZE), (SIZE, HIDDEN))


@pytest.fixture
def four_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


def _random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.3


def _gradients(*, adapted: bool) -> list[Tensor]:
    """Of the rows, the base model's matrices, and an adapter's."""
    hidden = _random(ROWS, HIDDEN, seed=0).requires_grad_()
    base = [_random(EXPERTS, 2 * SIZE, HIDDEN, seed=1), _random(EXPERTS, HIDDEN, SIZE, seed=2)]
    pairs = [(_random(EXPERTS, 3, i, seed=3), _random(EXPERTS, o, 3, seed=4)) for i, o in PROJECTIONS]
    adapters = [each for pair in pairs for each in pair] if adapted else []
    leaves = [matrix.requires_grad_() for matrix in (*base, *adapters)]
    weights, chosen = _random(ROWS, EXPERTS, seed=5).softmax(-1).topk(PER_ROW)
    updates = [ExpertsUpdate(0, ROWS, 0.5, pairs[:2], pairs[2])] if adapted else []
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
    pairs = [(_random(EXPERTS, 8, i, seed=3), _random(EXPERTS, o, 8, seed=4)) for i, o in PROJECTIONS]
    leaves = [matrix.requires_grad_() for pair in pairs for matrix in pair]
    gate_up, down = _random(EXPERTS, 2 * SIZE, HIDDEN, seed=1), _random(EXPERTS, HIDDEN, SIZE, seed=2)
    base = BaseExperts(gate_up.bfloat16(), down.bfloat16(), gated(silu), 2)
    weights, chosen = _random(ROWS, EXPERTS, seed=5).bfloat16().softmax(-1).topk(PER_ROW)
    kept: set[int] = set()

    def keep(tensor: Tensor) -> Tensor:
        if tensor.ndim == 3:
            kept.add(tensor.untyped_storage().data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden = _random(ROWS, HIDDEN, seed=0).bfloat16().requires_grad_()
        experts_with_updates(hidden, chosen, weights, base, [ExpertsUpdate(0, ROWS, 0.5, pairs[:2], pairs[2])])
    assert kept == {matrix.untyped_storage().data_ptr() for matrix in (*leaves, base.first, base.down)}


def test_the_bounds_of_adapters_are_copied_to_a_device_once_for_all_layers() -> None:
    device = torch.device("cpu")
    assert _on_device((0, 40, 40, 90), device) is _on_device((0, 40, 40, 90), device)
    assert _on_device((0, 40, 40, 91), device).tolist() == [0, 40, 40, 91]
