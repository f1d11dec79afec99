"""Which tests stay together, and which start first, when pytest-xdist runs tests in several processes.

A group runs in one process, in the order of its files. A module is a group, so that its fixtures are made once. Two
groups are larger: the tests on the server of tests/e2e/conftest.py, and those on the server of tests/fuzz/conftest.py.

This module knows paths of tests and nothing else of them. (pytest-xdist's own groups, `--dist loadgroup`, need marks
and write into node ids, which pytest 9.2 does not let them do.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from xdist.remote import Producer
    from xdist.scheduler import LoadScopeScheduling

SHARED_SERVER = "tests/e2e"
"""The group of the end-to-end tests that share a server. A new module in the folder belongs to it by default."""

OWN_SERVERS = frozenset(
    {
        "tests/e2e/test_colocated.py",
        "tests/e2e/test_cpu_cost.py",
        "tests/e2e/test_durability.py",
        "tests/e2e/test_keys.py",
        "tests/e2e/test_large_bodies.py",
        "tests/e2e/test_lifecycle.py",
        "tests/e2e/test_postgres.py",
        "tests/e2e/test_two_apis.py",
    }
)
"""Modules of that folder that do not use the shared server: each is a group."""

FUZZ = "tests/fuzz"

ORDER = (
    SHARED_SERVER,
    *sorted(OWN_SERVERS),
    "tests/faults",
    "tests/component/test_vllm_server.py",
    FUZZ,
    "tests/component",
    "tests/contract",
    "tests/unit",
)
"""Groups, or folders of groups, in the order in which they start: slow ones first, so that all processes end at about
the same time. What is not here starts last."""


def group_of(nodeid: str) -> str:
    """The group of a test."""
    path = nodeid.partition("::")[0]
    for folder in (SHARED_SERVER, FUZZ):
        if path.startswith(f"{folder}/") and path not in OWN_SERVERS:
            return folder
    return path


def start_of(nodeid: str) -> int:
    """The place in `ORDER` of the test's group."""
    group = group_of(nodeid)
    name = group if group in ORDER else group.rpartition("/")[0]
    return ORDER.index(name) if name in ORDER else len(ORDER)


def group_scheduling(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    """Gives the next group, in the order of the collection, to a process that has little left to do."""
    from xdist.scheduler import LoadScopeScheduling  # tests/gpu run where it may not be installed

    class GroupScheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    config.option.loadscopereorder = False
    return GroupScheduling(config, log)
