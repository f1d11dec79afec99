"""Groups of tests, and the order in which groups start, when pytest-xdist runs tests in several processes.

A group runs in one process, in the order of its files. Each module is a group, so that its fixtures are made once.
Some groups are larger: the tests on the servers of tests/fuzz/conftest.py, tests/plane/conftest.py,
tests/faults/conftest.py, tests/e2e/conftest.py and tests/e2e/tools/conftest.py, those on the cluster of
tests/ray/conftest.py, those on the vLLM of tests/component/inference/conftest.py, and the tests that import much of
vLLM. One group of all servers would take longer than all other tests together take in the other processes.

This module knows only the paths of tests. (pytest-xdist's own groups, `--dist loadgroup`, need marks and write into
node ids, and pytest 9.2 does not allow that.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.slow import RUNS_SLOW_TESTS

if TYPE_CHECKING:
    from xdist.remote import Producer
    from xdist.scheduler import LoadScopeScheduling

SHARED_SERVER = "tests/e2e"
"""The group of the end-to-end tests that share a server. A new module of the folder belongs to it by default."""

OTHER_HALF = "tests/e2e/test_openai.py"
"""The group of those that share a second such server: one group of all takes more than ten minutes of two cores."""
OTHER_HALF_MODULES = frozenset(
    {
        "tests/e2e/test_agents_on_page.py",
        OTHER_HALF,
        "tests/e2e/test_pages.py",
        "tests/e2e/test_protocol_points.py",
        "tests/e2e/test_quotas.py",
        "tests/e2e/test_sampling.py",
        "tests/e2e/test_sampling_features.py",
        "tests/e2e/test_sdk_retries.py",
        "tests/e2e/test_sight.py",
        "tests/e2e/test_status_page.py",
        "tests/e2e/test_vllm_fields.py",
    }
)

PROGRAMS = "tests/e2e/sdk"
"""The group of the end-to-end tests of other programs, the released SDKs and the cookbook, on a second server. `make
test` runs few of them, on the shared one."""
PROGRAM_FOLDERS = (PROGRAMS, "tests/e2e/cookbook")

OWN_SERVERS = frozenset(
    {
        "tests/e2e/test_agent_examples.py",
        "tests/e2e/test_base_models.py",
        "tests/e2e/test_cluster_gateways.py",
        "tests/e2e/test_colocated.py",
        "tests/e2e/test_durability.py",
        "tests/e2e/test_full_finetuning.py",
        "tests/e2e/test_keys.py",
        "tests/e2e/test_mixtures.py",
        "tests/e2e/test_postgres.py",
        "tests/e2e/test_replicas.py",
        "tests/e2e/test_two_apis.py",
    }
)
"""Modules of `SHARED_SERVER` that do not use the shared server: each is a group."""

TOOLS = "tests/e2e/tools"
"""The tests on a server whose model calls tools, and whose sessions expire soon."""
FUZZ = "tests/fuzz"
PLANE = "tests/plane"
RAY = "tests/ray"

VLLM_CODE = "tests/unit/inference"
"""The tests of what changes vLLM: one process imports all that they use of it, which takes 20 s."""

ONE_VLLM = "tests/component/inference/test_vllm_server.py"
"""The group of the modules that use one vLLM without a server of skyrl."""
ONE_VLLM_MODULES = frozenset({"tests/component/inference/test_sidecar_vllm.py", ONE_VLLM})

MORTAL = "tests/faults/test_vllm_replaced.py"
"""The group of the modules that kill parts of one server with a vLLM."""
MORTAL_MODULES = frozenset({"tests/faults/test_agent_durability.py", MORTAL})

ORDER = (
    OTHER_HALF,
    SHARED_SERVER,
    PROGRAMS,
    PLANE,
    RAY,
    TOOLS,
    *sorted(OWN_SERVERS),
    "tests/faults",
    "tests/release",
    ONE_VLLM,
    FUZZ,
    VLLM_CODE,
    "tests/unit/trainer",
    "tests/component",
    "tests/deploy",
    "tests/contract",
    "tests/unit",
)
"""Groups, or folders of groups, in the order in which they start: slow groups first, so that all processes end at about
the same time; one of tests/unit/trainer takes a minute. Groups that are not listed start last."""


def group_of(nodeid: str) -> str:
    """The group of a test."""
    path = nodeid.partition("::")[0]
    if RUNS_SLOW_TESTS and path.startswith(tuple(f"{folder}/" for folder in PROGRAM_FOLDERS)):
        return PROGRAMS
    for group, modules in ((OTHER_HALF, OTHER_HALF_MODULES), (MORTAL, MORTAL_MODULES), (ONE_VLLM, ONE_VLLM_MODULES)):
        if path in modules:
            return group
    for folder in (TOOLS, SHARED_SERVER, FUZZ, PLANE, RAY, VLLM_CODE):
        if path.startswith(f"{folder}/") and path not in OWN_SERVERS:
            return folder
    return path


def start_position(nodeid: str) -> int:
    """The place of the test's group in `ORDER`."""
    group = group_of(nodeid)
    while group and group not in ORDER:
        group = group.rpartition("/")[0]
    return ORDER.index(group) if group else len(ORDER)


def group_scheduling(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    """A scheduler that gives the next group, in the order of the collection, to a process with little left to do."""
    from xdist.scheduler import LoadScopeScheduling  # the machine that runs tests/gpu may not have pytest-xdist

    class GroupScheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    config.option.loadscopereorder = False
    return GroupScheduling(config, log)
