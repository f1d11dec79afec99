"""The setting `trainer.kernels`, and the functions through torch.compile, with inductor's C++ on a CPU."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator

import pytest
import torch
from between_cases import cases
from torch._dynamo.utils import counters
from torch._inductor import config as inductor

from skyrl.base.config.backend import ConfigError
from skyrl.trainer.kernels.between import IN_TORCH
from skyrl.trainer.kernels.fused import between_for, compiled
from skyrl.trainer.kernels.fused_norms import WITH_FUSED_NORMS

# of inductor's own imports
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
QUICK = ("rotated",)
SLOW = ("rms_norm", "add_rms_norm", "rms_norm_backward", "normed", "rotated_backward", "swiglu", "swiglu_backward")


@pytest.fixture(autouse=True)
def no_more_processes() -> Iterator[None]:
    """Inductor compiles in this process alone."""
    with inductor.patch(compile_threads=1):
        yield


def test_torch_has_norms_of_one_kernel_on_cuda() -> None:
    assert between_for("torch", CPU) is IN_TORCH
    assert between_for("torch", CUDA) is WITH_FUSED_NORMS


def test_refused_where_a_gpu_a_package_or_a_compiler_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match='^trainer.kernels: "triton" needs a GPU, and the trainer computes on cpu$'):
        between_for("triton", CPU)
    monkeypatch.setenv("CXX", "no-such-compiler -O2")
    with pytest.raises(ConfigError, match='^trainer.kernels: "compiled" needs a compiler.* no no-such-compiler$'):
        between_for("compiled", CPU)
    monkeypatch.setattr(torch, "compile", lambda model, *, fullgraph: model)  # as torch 2.11's, without later options
    with pytest.raises(ConfigError, match='^trainer.kernels: "compiled" needs a newer torch than 2'):
        between_for("compiled", CPU)
    monkeypatch.setitem(sys.modules, "triton", None)
    for kernels in ("triton", "compiled"):
        with pytest.raises(ConfigError, match=f'^trainer.kernels: "{kernels}" needs the package triton'):
            between_for(kernels, CUDA)


@pytest.mark.skipif(shutil.which("gcc") is None, reason="no C compiler")
def test_triton_kernels_are_chosen() -> None:
    pytest.importorskip("triton", reason="no package triton for this system")
    from skyrl.trainer.kernels.triton_kernels import IN_TRITON

    assert between_for("triton", CUDA) is IN_TRITON


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
@pytest.mark.parametrize("function", [*QUICK, *(pytest.param(each, marks=pytest.mark.slow) for each in SLOW)])
@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16])
def test_compiled_functions_have_the_errors_of_plain_torch(dtype: torch.dtype, function: str) -> None:
    of = between_for("compiled", CPU)
    for rows in (5, 9, 300):
        for case in cases(rows, 96, dtype, apart=function == "rotated"):
            if case.function == function:
                case.check(of)


def test_functions_are_compiled_once_for_any_number_of_rows() -> None:
    """Traced by torch.compile as for inductor, which gets what is traced."""
    of = compiled("aot_eager")

    def compilations(rows: int, *, gradients: bool) -> int:
        before = counters["stats"]["unique_graphs"]
        for case in cases(rows, 96, torch.bfloat16, apart=False):
            tensors = [each for each in case.arguments if isinstance(each, torch.Tensor) and each.is_floating_point()]
            tensors[-1].requires_grad_(gradients)
            with torch.set_grad_enabled(gradients):
                case.results(of)
        return counters["stats"]["unique_graphs"] - before

    found = [compilations(5, gradients=False)]
    found += [compilations(rows, gradients=gradients) for rows in (9, 300, 2, 1) for gradients in (False, True)]
    assert found == [10, *[0] * 8]  # of rotations one with and one without a norm


@pytest.mark.parametrize("rows", [0, 1])
def test_plain_torch_computes_few_rows(rows: int) -> None:
    x = torch.randn(rows, 96)
    assert torch.equal(compiled("aot_eager").swiglu(x, x), IN_TORCH.swiglu(x, x))
