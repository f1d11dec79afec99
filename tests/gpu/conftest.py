"""Where the GPU tests run and where they are skipped, and what is printed at the end."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before cuBLAS is first used
HERE = Path(__file__).parent
WANTED = os.environ.get("SKYRL_TEST_DEVICE")
if WANTED == "cpu":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def _why_not() -> str | None:
    if WANTED == "cpu":
        return None
    import torch

    if torch.cuda.is_available():
        return None
    return "needs a CUDA device; SKYRL_TEST_DEVICE=cpu rehearses it on a CPU (docs/gpu.md)"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = [item for item in items if HERE in item.path.parents]
    why = _why_not() if here else None
    for item in here:
        item.add_marker(pytest.mark.gpu)
        # torch says so where it has no deterministic kernel; the tests compare numbers instead
        item.add_marker(pytest.mark.filterwarnings("ignore:.*deterministic:UserWarning"))
        if why is not None:
            item.add_marker(pytest.mark.skip(reason=why))


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
def memory_is_given_back() -> Iterator[None]:
    """What a test took is free for the next one."""
    yield
    import gc

    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()
