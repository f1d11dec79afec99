"""When the placer gives up: no vLLM can start. A node that cannot run one of several does not count."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from skyrl.placer.life import Starts
from skyrl.placer.ray_server import NOT_STARTED

REFUSAL = "on node 10.0.0.1: vLLM is not installed"


def starts_of(count: int) -> tuple[Starts, list[Any]]:
    starts = Starts()
    servers: list[Any] = [SimpleNamespace(has_answered=False) for _ in range(count)]
    starts.servers = servers
    for number in range(count):
        process: Any = SimpleNamespace(log_tail=lambda lines: REFUSAL)
        starts.watch(f"vllm-{number}", process)
    return starts, servers


async def test_the_only_vllm_that_its_node_refuses_ends_the_start() -> None:
    starts, _ = starts_of(1)
    starts.ended("vllm-0", NOT_STARTED, None)
    assert (await starts.hopeless).sentence == REFUSAL


async def test_one_of_two_that_its_node_refuses_does_not_end_the_start_of_the_other() -> None:
    starts, _ = starts_of(2)
    for _ in range(3):
        starts.ended("vllm-0", NOT_STARTED, None)
    assert not starts.hopeless.done()
    starts.ended("vllm-1", NOT_STARTED, None)
    assert (await starts.hopeless).sentence == REFUSAL


@pytest.mark.parametrize("count", [1, 2])
async def test_once_a_vllm_has_answered_others_are_tried_for_ever(count: int) -> None:
    starts, servers = starts_of(count)
    servers[0].has_answered = True
    for number in range(count):
        starts.ended(f"vllm-{number}", NOT_STARTED, None)
    assert not starts.hopeless.done()
