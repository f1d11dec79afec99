"""The Triton kernels of target logprobs against torch's own operations. `test_logprob_kernels` runs these tests on a
CPU, in a process of their own, because `TRITON_INTERPRET=1` must be set before the first import of triton. Without that
variable pytest runs them on a GPU."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_lora_support import VOCAB, grpo, make_backend, ok, spec, train

from skyrl.trainer.kernels import logprobs as kernels
from skyrl.trainer.model import logprobs as logprobs_module
from skyrl.trainer.model.logprobs import _LogSoftmaxAt  # pyright: ignore[reportPrivateUsage]
from tests.local_ranks import rank_of

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
ROUNDED = 2**-7 if INTERPRETED else 2**-8
"""Of a number in bfloat16, which has 8 bits. The interpreter cuts the rest off, where a GPU rounds."""
OWNERS = [0, 0, 0, 2, 3, 3]
"""Several targets of a row; rows 1 and 4 have none."""


def _both(logits: Tensor, owners: Tensor, ids: Tensor, gradient: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Logprobs and the gradient of the logits, both float32: of the kernels, and of torch in float32."""
    found: list[tuple[Tensor, Tensor]] = []
    ways: list[tuple[Any, Tensor]] = [(kernels.LogSoftmaxAt, logits), (_LogSoftmaxAt, logits.float())]
    for way, own in ways:
        leaf = own.clone().requires_grad_()
        made = way.apply(leaf * 1, owners, ids)
        (of_logits,) = torch.autograd.grad(made, leaf, gradient)
        assert (made.dtype, of_logits.dtype) == (torch.float32, own.dtype)
        found.append((made.detach(), of_logits.float()))
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocabulary", [7, 8192, 16_411])
def test_kernels_give_the_logprobs_and_gradients_of_torch(vocabulary: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    logits = (torch.randn(5, vocabulary, generator=generator) * 5).to(DEVICE, dtype)
    ids = torch.tensor([0, 3, vocabulary - 1, 5, 6, 0], device=DEVICE)
    gradient = torch.randn(6, generator=generator).to(DEVICE)
    (found, of_found), (expected, of_expected) = _both(logits, torch.tensor(OWNERS, device=DEVICE), ids, gradient)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(of_found, of_expected, rtol=ROUNDED if dtype == torch.bfloat16 else 2e-5, atol=1e-7)
    assert of_found.any(1).tolist() == [True, False, True, True, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_extreme_logits_have_torchs_numbers(dtype: torch.dtype) -> None:
    """Huge ones, so that all but one exp are 0; equal ones; and minus infinity: of a first block, and all but one."""
    logits = torch.zeros(5, 16_411, device=DEVICE)
    logits[0, 9000] = 1e30
    logits[1] = -1e30
    logits[2, :8192] = -torch.inf
    logits[3] = -torch.inf
    logits[3, 5] = 3.0
    ids = torch.tensor([9000, 1, 2, 5, 16_410, 8191], device=DEVICE)
    owners = torch.tensor([0, 0, 1, 3, 4, 4], device=DEVICE)
    gradient = torch.tensor([1.0, -2.0, 0.5, 3.0, 1.0, 1.0], device=DEVICE)
    (found, of_found), (expected, of_expected) = _both(logits.to(dtype), owners, ids, gradient)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(of_found, of_expected, rtol=ROUNDED, atol=1e-7)
    largest, sums = kernels.norms_of(torch.full((1, 9), -torch.inf, device=DEVICE, dtype=dtype))
    assert (largest.item(), sums.item()) == (0, 0)


def test_a_pass_in_kernels_has_the_numbers_of_a_pass_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """In several chunks, in one backward with the logprobs."""
    monkeypatch.setattr(logprobs_module, "LOGITS_BYTES", 16 * VOCAB * 4)
    found: list[tuple[float, Tensor]] = []
    for in_kernels in (False, True):
        backend = make_backend()
        backend.create_model("m", spec())
        rank_of(backend).base.packed.logprobs_in_kernels = in_kernels
        (result,) = ok(backend.run([train("m", grpo(0, 2, 3, 12), "ppo")]))
        gradient = rank_of(backend).adapters["m"].gradient
        assert gradient is not None
        found.append((result.metrics["loss:sum"], gradient.float()))
    (loss, expected), (of_kernels, own) = found
    assert of_kernels == pytest.approx(loss, rel=1e-5)
    torch.testing.assert_close(own, expected, rtol=1e-3, atol=2e-5 * float(expected.abs().max()))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of the interpreter's NumPy
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_logit_that_is_not_finite_spoils_its_own_row(value: float) -> None:
    logits = torch.zeros(2, 40, device=DEVICE)
    logits[0, 3] = value
    owners, ids = torch.tensor([0, 1], device=DEVICE), torch.tensor([1, 1], device=DEVICE)
    (found, of_found), (expected, of_expected) = _both(logits, owners, ids, torch.ones(2, device=DEVICE))
    for one, other in ((found, expected), (of_found, of_expected)):
        assert [bool(each[0].isfinite().all()) for each in (one, other)] == [False, False]
        torch.testing.assert_close(one[1], other[1])
