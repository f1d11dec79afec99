"""Skips the GPU tests on machines without a GPU, sets their order, and prints and writes what they find at once."""

from __future__ import annotations

import datetime
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gpu.figures import FIGURES, REHEARSAL
from tests.gpu.order import place_of

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # must be set before cuBLAS is first used
HERE = Path(__file__).parent
DEVICE = os.environ.get("SKYRL_TEST_DEVICE")
if DEVICE == "cpu":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def _skip_reason() -> str | None:
    if DEVICE == "cpu":
        return None
    import torch

    if torch.cuda.is_available():
        return None
    return "needs a CUDA device; SKYRL_TEST_DEVICE=cpu rehearses it on a CPU (docs/gpu.md)"


def _is_here(item: pytest.Item) -> bool:
    return str(item.path).startswith(f"{HERE}/")  # asked of 10,000 items in each process: `parents` takes 0.4 s


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_tests = [item for item in items if _is_here(item)]
    reason = _skip_reason() if gpu_tests else None
    for item in gpu_tests:
        item.add_marker(pytest.mark.gpu)
        # torch warns where it has no deterministic kernel; the tests compare numbers, not bits, there
        item.add_marker(pytest.mark.filterwarnings("ignore:.*deterministic:UserWarning"))
        # of inductor's imports, with {"trainer.kernels": "compiled"} in SKYRL_TEST_SETTINGS in any test
        item.add_marker(pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"))
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))
    places = iter(sorted(gpu_tests, key=lambda item: place_of(item.nodeid)))
    items[:] = [next(places) if _is_here(item) else item for item in items]
    if gpu_tests and reason is None:
        FIGURES.add(**_machine())


def _machine() -> dict[str, str]:
    import torch

    where = REHEARSAL if DEVICE == "cpu" else torch.cuda.get_device_name()
    return {
        "where": where,
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "python": platform.python_version(),
        "day": datetime.date.today().isoformat(),
        "settings": os.environ.get("SKYRL_TEST_SETTINGS", ""),
    }


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """After each GPU test: its outcome into the file of figures, and its figures onto the terminal."""
    if "tests/gpu/" not in report.nodeid or report.when == "teardown" or not FIGURES.lines:
        return
    if report.when == "call" or report.skipped or report.failed:
        name = report.nodeid.rpartition("tests/gpu/")[2]
        FIGURES.add(test=name, outcome=report.outcome, seconds=round(report.duration, 1))
    if told := FIGURES.untold():
        print("", *told, sep="\n", file=sys.__stderr__, flush=True)


@pytest.fixture(scope="session")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory for base models that tests share."""
    return tmp_path_factory.mktemp("bases")


@pytest.fixture(autouse=True)
def free_memory() -> Iterator[None]:
    """Frees the GPU memory of a test for the next one."""
    yield
    import gc

    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()
