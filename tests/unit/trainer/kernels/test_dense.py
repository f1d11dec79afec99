"""Products of matrices by torch's default and by oneDNN, beside float64."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor

from skyrl.trainer.kernels import dense

_HAS_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


@pytest.fixture(params=[False, True], ids=["default", "onednn"])
def onednn(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if request.param and not _HAS_ONEDNN:
        pytest.skip("this torch has no oneDNN")
    monkeypatch.setattr(dense, "onednn_is_faster", lambda: request.param)
    monkeypatch.setattr(dense, "SMALL", 0)
    return request.param


def _numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _close(found: Tensor, exact: Tensor) -> None:
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=2e-6 * float(exact.abs().max()))


@pytest.mark.parametrize("shape", [(1, 16), (300, 33), (2, 150, 64)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear_is_that_of_float64(onednn: bool, shape: tuple[int, ...], with_bias: bool) -> None:
    x, weight, bias = _numbers(*shape), _numbers(77, shape[-1], seed=1), _numbers(77, seed=2)
    given = bias if with_bias else None
    exact = x.double() @ weight.double().t() + (bias.double() if with_bias else 0)
    made = dense.linear(x, weight, given)
    assert made.shape == (*shape[:-1], 77)
    assert made.is_contiguous()
    _close(made, exact)
    _close(dense.linear(x, weight.t().contiguous().t(), given), exact)


@pytest.mark.parametrize("rows", [5, 300])
@pytest.mark.parametrize("keep", [False, True])
def test_a_product_is_added_to_some_rows_of_a_tensor(onednn: bool, rows: int, keep: bool) -> None:
    whole, low_rank, b = _numbers(rows + 9, 40), _numbers(rows, 12, seed=1), _numbers(8, 40, seed=2)
    a, before = low_rank[:, 3:11], whole.clone()
    dense.product_into(whole[4:-5], a, b, scale=0.5, keep=keep)
    exact = 0.5 * a.double() @ b.double()
    _close(whole[4:-5], exact + before[4:-5].double() if keep else exact)
    assert torch.equal(whole[:4], before[:4])
    assert torch.equal(whole[-5:], before[-5:])


@pytest.mark.parametrize("columns", [(8, 40), (40, 8)])
@pytest.mark.parametrize("rows", [7, 300, 2 * dense.ROWS_OF_SUM + 1])
def test_a_sum_over_rows_is_that_of_float64(onednn: bool, columns: tuple[int, int], rows: int) -> None:
    a, b = (_numbers(rows, size, seed=size) for size in columns)
    made = dense.sum_over_rows(a, b, scale=3.0)
    assert made.is_contiguous()
    _close(made, 3 * a.double().t() @ b.double())


@pytest.mark.parametrize("with_bias", [False, True])
def test_a_trained_layer_has_the_gradients_of_float64(onednn: bool, with_bias: bool) -> None:
    layer = torch.nn.Linear(24, 40, bias=with_bias)
    dense.install(torch.nn.Sequential(layer))
    x, gradient = _numbers(2, 300, 24).requires_grad_(), _numbers(2, 300, 40, seed=1)
    leaves = [x, *layer.parameters()]
    exact = torch.nn.functional.linear(*(each.double() for each in leaves))
    made = layer(x)
    assert (type(made.grad_fn).__name__ == "_LinearBackward") == onednn
    _close(made.detach(), exact.detach())
    for found, of_exact in zip(
        torch.autograd.grad(made, leaves, gradient),
        torch.autograd.grad(exact, leaves, gradient.double()),
        strict=True,
    ):
        _close(found, of_exact.double())


def test_a_row_has_the_same_bits_beside_any_others(onednn: bool) -> None:
    """But for the very few rows for which the library has kernels of their own."""
    x, weight, low_rank = _numbers(1000, 320), _numbers(128, 320, seed=1), _numbers(32, 128, seed=2)
    made = dense.linear(x, weight)
    total = _numbers(1000, 128, seed=3)
    added = total.clone()
    dense.product_into(added, made[:, :32], low_rank)
    for start, stop in ((0, 4), (17, 100), (300, 557), (1, 1000)):
        assert torch.equal(dense.linear(x[start:stop].clone(), weight), made[start:stop])
        alone = total[start:stop].clone()
        dense.product_into(alone, made[start:stop, :32], low_rank)
        assert torch.equal(alone, added[start:stop])


_MANY_SHAPES = """
import os, torch
from skyrl.trainer.device import prepare_device
from skyrl.trainer.kernels import dense

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

prepare_device(1)
dense.onednn_is_faster, dense.SMALL = lambda: True, 0
x, weight = torch.randn(2000, 64), torch.randn(32, 64)
for rows in range(2, 302):
    dense.linear(x[:rows], weight)
before = resident()
for rows in range(302, 1302):
    dense.linear(x[:rows], weight)
print(resident() - before)
"""


@pytest.mark.skipif(not (_HAS_ONEDNN and sys.platform == "linux"), reason="needs oneDNN, and reads /proc")
def test_what_a_process_keeps_of_shapes_is_bounded() -> None:
    """Without the bound a thousand shapes more take over 500 MiB."""
    made = subprocess.run([sys.executable, "-c", _MANY_SHAPES], capture_output=True, text=True, timeout=120, check=True)
    assert float(made.stdout) < 100


def test_only_large_products_of_float32_on_a_cpu_take_onednn(onednn: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(dense, "onednn_is_faster", lambda: onednn)
    assert dense.takes_onednn(torch.zeros(2, 64, 64), 512) == onednn
    assert not dense.takes_onednn(torch.zeros(127, 64), 512)
    assert not dense.takes_onednn(torch.zeros(128, 64, dtype=torch.bfloat16), 512)
    assert not dense.takes_onednn(torch.zeros(128, 64, device="meta"), 512)
