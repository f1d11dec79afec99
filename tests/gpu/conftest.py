"""Skips the GPU tests on machines without a GPU, and prints their figures at the end."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_tests = [item for item in items if HERE in item.path.parents]
    reason = _skip_reason() if gpu_tests else None
    for item in gpu_tests:
        item.add_marker(pytest.mark.gpu)
        # torch warns where it has no deterministic kernel; the tests compare numbers, not bits, there
        item.add_marker(pytest.mark.filterwarnings("ignore:.*deterministic:UserWarning"))
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    import sys

    support = sys.modules.get("tests.gpu.support")
    if support is not None and support.FIGURES:
        terminalreporter.section("figures")
        terminalreporter.write_line(support.report())


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
