"""The functions between the products as kernels of a GPU: their errors, how many kernels each starts, their time."""

from __future__ import annotations

import pytest
import torch
from between_cases import Case, cases
from torch.profiler import ProfilerActivity, profile

from skyrl.base.config.backend import ConfigError, Kernels
from skyrl.trainer.kernels.between import Between
from skyrl.trainer.kernels.fused import between_for
from tests.gpu.figures import FIGURES
from tests.gpu.support import DEVICE

pytestmark = pytest.mark.skipif(
    DEVICE == "cpu", reason="kernels for GPUs; tests/unit/trainer/kernels has what runs on a CPU"
)
ROWS, WIDTH = 8192, 1024


@pytest.mark.parametrize("kernels", ["triton", "compiled"])
def test_errors_are_those_of_plain_torch(kernels: Kernels) -> None:
    of = _functions(kernels)
    for rows, n, apart in ((300, 128, False), (37, 96, True), (0, 128, False), (1, 1000, False), (37, WIDTH, True)):
        for case in cases(rows, n, torch.bfloat16, apart=apart, device=DEVICE):
            if rows:
                case.check(of)
            else:
                case.results(of)


@pytest.mark.parametrize("kernels", ["torch", "compiled", "triton"])
def test_each_function_starts_few_kernels(kernels: Kernels) -> None:
    of = _functions(kernels)
    found: dict[str, tuple[int, float]] = {}
    for case in cases(ROWS, WIDTH, torch.bfloat16, apart=False, device=DEVICE):
        found.setdefault(case.function, _kernels(case, of))  # of rotations: with a norm
    for function, (count, seconds) in found.items():
        FIGURES.record(f"{function}, {ROWS} x {WIDTH}, {kernels}: kernels", count)
        FIGURES.record(f"{function}, {ROWS} x {WIDTH}, {kernels}: µs", round(seconds * 1e6, 1))
    assert kernels != "triton" or {count for count, _ in found.values()} == {1}


def _functions(kernels: Kernels) -> Between:
    try:
        return between_for(kernels, torch.device(DEVICE))
    except ConfigError as error:  # such as a torch that is too old for it
        pytest.skip(str(error))


def _kernels(case: Case, of: Between) -> tuple[int, float]:
    """The kernels of the second call, and their seconds. The first call compiles."""
    case.results(of)
    arguments = case.again()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as profiled:
        getattr(of, case.function)(*arguments)
        torch.cuda.synchronize()
    events = profiled.events() or []
    kernels = [event for event in events if "CUDA" in str(event.device_type) and not event.is_user_annotation]
    return len(kernels), sum(event.self_device_time_total for event in kernels) / 1e6
