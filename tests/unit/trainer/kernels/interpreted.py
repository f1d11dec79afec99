"""Own Triton kernels against plain torch and exact results, in Triton's interpreter: `test_triton_kernels` runs these
tests in a process of their own, because `TRITON_INTERPRET=1` must be set before the first import of triton."""

from __future__ import annotations

import pytest
import torch
from between_cases import cases
from triton_interpreter import compute_as_a_gpu

from skyrl.trainer.kernels.between import IN_TORCH
from skyrl.trainer.kernels.triton_kernels import IN_TRITON
from skyrl.trainer.lora.linear import linear_with_updates
from skyrl.trainer.lora.products import StackedUpdate

DTYPES = (torch.float32, torch.bfloat16)
# exp(200) is infinite, and its inverse 0, as on a GPU
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")


@pytest.fixture(autouse=True)
def rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    compute_as_a_gpu(monkeypatch)


@pytest.mark.parametrize(("n", "apart"), [(24, False), (96, True), (128, False), (320, True), (1000, True)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_errors_are_those_of_plain_torch(dtype: torch.dtype, n: int, apart: bool) -> None:
    for case in cases(3, n, dtype, apart=apart):
        case.check(IN_TRITON)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_is_computed_again_with_the_same_bits(dtype: torch.dtype) -> None:
    x, weight = torch.randn(4, 96).to(dtype), torch.randn(96).to(dtype)
    y, rstd = IN_TRITON.rms_norm(x, weight, 1e-6)
    assert torch.equal(IN_TRITON.normed(x, weight, rstd, 1e-6), y)


@pytest.mark.parametrize("lengths", [(0, 10, 60, 0, 75, 5), (150,), (2,) * 75, (0,) * 149 + (150,)])
def test_blocks_of_rows_may_have_several_groups_and_groups_several_blocks(lengths: tuple[int, ...]) -> None:
    """More groups than are looked at together, too. Rows after the last group stay as they are."""
    ends = torch.tensor(lengths).cumsum(0).int()
    out, x, matrices = torch.randn(160, 200), torch.randn(160, 12), torch.randn(len(lengths), 12, 200)
    exact = out.double()
    for group, rows in enumerate(torch.arange(150).split(list(lengths))):
        exact[rows] += x[rows].double() @ matrices[group].double()
    found = out.clone()
    assert IN_TRITON.add_grouped(found, x, matrices, ends) is found
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)
    assert torch.equal(found[150:], out[150:])


def test_matrices_that_are_not_finite_spoil_their_own_rows() -> None:
    out, x, matrices = torch.zeros(20, 32), torch.ones(20, 16), torch.ones(3, 16, 32)
    matrices[1] = torch.nan
    found = IN_TRITON.add_grouped(out, x, matrices, torch.tensor([5, 9, 20], dtype=torch.int32))
    assert found.isfinite().all(1).tolist() == [True] * 5 + [False] * 4 + [True] * 11


def test_a_layer_with_stacked_adapters_gives_what_it_gives_without_the_kernel() -> None:
    """On some of its rows, forward and backward."""
    x, weight, gradient = torch.randn(70, 40), torch.randn(48, 40), torch.randn(70, 48)
    lora_a, lora_b, ends = torch.randn(3, 8, 40), torch.randn(3, 48, 8), torch.tensor([4, 30, 62], dtype=torch.int32)
    found: list[tuple[torch.Tensor, ...]] = []
    for add in (IN_TORCH.add_grouped, IN_TRITON.add_grouped):
        leaves = [each.clone().requires_grad_() for each in (x, lora_a, lora_b)]
        update = StackedUpdate(3, 65, leaves[1], leaves[2], ends, add)
        output = linear_with_updates(leaves[0], weight, None, [update])
        found.append((output.detach(), *torch.autograd.grad(output, leaves, gradient)))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_no_rows() -> None:
    x = torch.empty(0, 96)
    assert IN_TRITON.swiglu(x, x).shape == (0, 96)
    assert IN_TRITON.rms_norm(x, torch.ones(96), 1e-6)[1].shape == (0,)
    ends = torch.zeros(2, dtype=torch.int32)
    assert IN_TRITON.add_grouped(x, x[:, :8], torch.ones(2, 8, 96), ends).shape == (0, 96)


def test_a_row_whose_elements_lie_apart_is_refused() -> None:
    x = torch.ones(96, 4).t()
    with pytest.raises(AssertionError, match="elements of a row lie apart"):
        IN_TRITON.swiglu(x, x)
