"""When several processes run the tests: which tests share a process, and in which order groups start."""

from __future__ import annotations

import pytest

from tests.environments import ROOT
from tests.grouping import (
    FUZZ,
    MORTAL,
    MORTAL_MODULES,
    ONE_VLLM,
    ONE_VLLM_MODULES,
    ORDER,
    OTHER_HALF,
    OTHER_HALF_MODULES,
    OWN_SERVERS,
    PROGRAMS,
    SHARED_SERVER,
    TOOLS,
    group_of,
    start_position,
)
from tests.slow import RUNS_SLOW_TESTS


@pytest.mark.parametrize(
    ("nodeid", "group"),
    [
        ("tests/unit/sampling/test_bucket.py::test_one[a/b::c]", "tests/unit/sampling/test_bucket.py"),
        ("tests/component/engine/test_old_rows.py::test_one", "tests/component/engine/test_old_rows.py"),
        ("tests/e2e/test_of_somebody_new.py::test_one", SHARED_SERVER),
        ("tests/e2e/test_pages.py::test_one[a/b::c]", OTHER_HALF),
        ("tests/e2e/sdk/test_matrix.py::test_one", PROGRAMS if RUNS_SLOW_TESTS else SHARED_SERVER),
        ("tests/e2e/test_durability.py::test_one", "tests/e2e/test_durability.py"),
        ("tests/e2e/tools/test_tools.py::test_one", TOOLS),
        ("tests/component/inference/test_sidecar_vllm.py::test_one", ONE_VLLM),
        ("tests/faults/test_agent_durability.py::test_one", MORTAL),
        ("tests/faults/test_vllm_replaced.py::test_one", MORTAL),
        ("tests/faults/test_shutdown.py::test_one", "tests/faults/test_shutdown.py"),
        ("tests/fuzz/test_found.py::test_one", FUZZ),
    ],
)
def test_a_module_is_a_group_and_the_tests_of_a_shared_server_are_one(nodeid: str, group: str) -> None:
    assert group_of(nodeid) == group


def test_slow_groups_start_first_and_unlisted_ones_last() -> None:
    in_order = [
        "tests/e2e/test_sampling.py",
        "tests/e2e/test_new.py",
        "tests/e2e/test_durability.py",
        "tests/faults/test_a.py",
        "tests/unit/test_a.py",
    ]
    places = [start_position(f"{path}::test_one") for path in (*in_order, "tests/gpu/test_a.py")]
    assert places == sorted(set(places))


def test_the_paths_of_the_groups_exist() -> None:
    modules = (*OTHER_HALF_MODULES, *OWN_SERVERS, *MORTAL_MODULES, *ONE_VLLM_MODULES)
    assert all((ROOT / path).exists() for path in (*ORDER, *modules))


def test_modules_listed_with_a_server_of_their_own_do_not_use_the_shared_one(request: pytest.FixtureRequest) -> None:
    """Checks the selected tests, so a run of all tests checks all modules."""
    for item in request.session.items:
        if isinstance(item, pytest.Function) and item.nodeid.partition("::")[0] in OWN_SERVERS:
            assert "server" not in item.fixturenames or hasattr(item.module, "server"), item.nodeid
