"""The Ray cluster on loopback that the tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from .machines import Machine, Machines, machines

BOX: dict[str, Any] = {"cpus": 1, "resources": '{"box": 1}'}
"""A node for one vLLM or rank of a test that asks for a box."""


@pytest.fixture(scope="package")
def cluster() -> Iterator[Machines]:
    """The cluster. This process is not connected to it."""
    with machines() as running:
        yield running


@pytest.fixture(scope="module")
def two_nodes(cluster: Machines) -> list[Machine]:
    """Two nodes with one CPU and one box each: those that an earlier module has left, or new ones."""
    while len(cluster.workers()) < 2:
        cluster.add(**BOX)
    return cluster.workers()


@pytest.fixture(scope="module")
def boxes(cluster: Machines) -> list[Machine]:
    """Two new nodes, the only ones with boxes. A test may add another."""
    for other in cluster.workers():
        other.kill()
    return [cluster.add(**BOX), cluster.add(**BOX)]


def addresses(boxes: list[Machine], *numbers: int) -> set[str]:
    return {boxes[number].address for number in numbers}
