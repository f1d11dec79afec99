"""A linear layer with adapters on slices of its rows, against plain operations of torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch_lora_support import make_backend, ok, sft, spec, train

from skyrl.trainer.lora.linear import RowsUpdate, linear_with_updates
from skyrl.trainer.ranks import lora_backend as backend_module
from tests.local_ranks import rank_of

PLACES = ((0, 3, 4, 8.0), (3, 4, 1, 0.5), (6, 11, 8, 4.0))
"""First row, last row + 1, rank, scale. Rows 4 and 5 have no adapter."""
ROWS, INS, OUTS = 11, 12, 20


def _tensors(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, list[RowsUpdate]]:
    torch.manual_seed(0)
    updates = [
        RowsUpdate(first, last, scale, *(torch.randn(shape).requires_grad_() for shape in ((rank, INS), (OUTS, rank))))
        for first, last, rank, scale in PLACES
    ]
    if dtype == torch.float64:
        updates = [each._replace(lora_a=each.lora_a.double(), lora_b=each.lora_b.double()) for each in updates]
    x, weight, bias = torch.randn(1, ROWS, INS), torch.randn(OUTS, INS), torch.randn(OUTS)
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
    x, weight, bias, updates = _tensors()
    updates = updates[:count]
    given = bias if with_bias else None
    results = [function(x, weight, given, updates) for function in (linear_with_updates, _plain)]
    torch.testing.assert_close(*results)
    ours, theirs = (torch.autograd.grad(result.sin().sum(), _all(x, updates)) for result in results)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)


def test_one_adapter_on_all_rows_of_any_shape() -> None:
    x, weight, _, updates = _tensors()
    whole = [updates[0]._replace(start=0, stop=ROWS)]
    for shape in ((1, ROWS, INS), (ROWS, INS)):
        torch.testing.assert_close(
            linear_with_updates(x.view(shape), weight, None, whole).view(ROWS, OUTS),
            _plain(x, weight, None, whole)[0],
        )


def test_an_input_without_gradient_gets_none_and_adapters_get_theirs() -> None:
    x, weight, _, updates = _tensors()
    y = linear_with_updates(x.detach(), weight, None, updates)
    gradients = torch.autograd.grad(y.sum(), _all(x, updates), allow_unused=True)
    assert gradients[0] is None
    assert all(gradient is not None for gradient in gradients[1:])


def test_float32_adapters_of_a_bfloat16_layer_get_float32_gradients() -> None:
    x, weight, _, updates = _tensors(torch.bfloat16)
    y = linear_with_updates(x, weight, None, updates)
    assert y.dtype == torch.bfloat16
    gradients = torch.autograd.grad(y.float().sum(), _all(x, updates))
    assert [gradient.dtype for gradient in gradients] == [torch.bfloat16, *[torch.float32] * 6]


def test_numbers_that_are_not_finite_stay_with_their_adapter() -> None:
    x, weight, _, updates = _tensors()
    broken = x.detach().clone()
    broken[0, 0] = torch.nan
    expected = linear_with_updates(x, weight, None, updates)
    clean = torch.autograd.grad(expected[:, 3:].sum(), _all(x, updates)[3:])
    y = linear_with_updates(broken.requires_grad_(), weight, None, updates)
    of_adapters = torch.autograd.grad(y.sum(), _all(broken, updates)[1:])
    assert of_adapters[0].isnan().any()
    assert torch.equal(y[:, 3:], expected[:, 3:])
    for one, other in zip(of_adapters[2:], clean, strict=True):
        assert torch.equal(one, other)


def test_the_input_and_the_low_rank_rows_are_all_that_is_kept() -> None:
    x, weight, _, updates = _tensors()
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: (kept.append(tensor), tensor)[1], lambda each: each):
        linear_with_updates(x, weight, None, updates)
    known = {id(tensor) for tensor in (x, weight, *_all(x, updates))}
    shapes = [tuple(tensor.shape) for tensor in kept if id(tensor) not in known and tensor.shape != weight.shape]
    low_rank = [(last - first, rank) for first, last, rank, _ in PLACES]
    assert [shape for shape in shapes if shape in low_rank] == low_rank
    assert (ROWS, OUTS) not in [shape[-2:] for shape in shapes], "not the result"


def test_passes_share_a_micro_batch_on_a_cpu_only_up_to_a_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend_module, "SHARED_ROWS_ON_CPU", 64)
    sizes: list[list[int]] = []
    backend = make_backend(merge=True)
    run = rank_of(backend)._attempt
    monkeypatch.setattr(
        rank_of(backend),
        "_attempt",
        lambda batch, *, backward: (
            sizes.append([sum(len(datum.tokens) for datum in each.data) for each in batch]),
            run(batch, backward=backward),
        ),
    )
    for model_id in "abcd":
        backend.create_model(model_id, spec())
    ok(backend.run([train(model_id, sft(1, size)) for model_id, size in zip("abcd", (30, 30, 100, 20), strict=True)]))
    assert sizes == [[30, 30], [100], [20]]
