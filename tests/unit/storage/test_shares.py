"""The share of a tenant of the disk: what counts, for how long, and who is refused."""

from __future__ import annotations

import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from skyrl.base.wire.errors import RequestError
from skyrl.storage import shares
from skyrl.storage.shares import LEAST_BYTES, SHARE, DiskShares, SavesDisk

usage = namedtuple("usage", "total used free")
SPARE, MB = 100, 2**20


class World:
    """Shares on a disk with so many free bytes beside SPARE, and a clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.free, self.used = 1000.0, 100 * MB, 0
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(0, self.used, self.free + SPARE))
        self.shares = DiskShares(Path("/"), SPARE, requests_s=100.0, agents_s=1000.0, clock=lambda: self.now)

    def refuses(self, tenant: str) -> bool:
        self.now += shares.LOOK_S  # so that it looks at the disk again
        try:
            self.shares.check(tenant)
        except RequestError:
            return True
        return False


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def test_a_tenant_that_writes_alone_leaves_a_ninth_of_the_disk_free(world: World) -> None:
    whole, step = 900 * MB, MB
    world.free = whole
    while not world.refuses("a"):
        world.shares.hold("a", step)
        world.free -= step
    assert world.free == whole / (SHARE + 1)
    assert not world.refuses("b")


def test_a_tenant_with_little_is_served_on_a_full_disk(world: World) -> None:
    world.free = -SPARE
    world.shares.hold("a", LEAST_BYTES - 1)
    assert not world.refuses("a")
    world.shares.hold("a", 1)
    with pytest.raises(RequestError, match="result_retention_s") as refused:
        world.shares.check("a")
    assert (refused.value.status, refused.value.retry_after_s) == (429, shares.RETRY_S)
    assert not world.refuses("b")


def test_a_pending_request_counts_and_an_ended_one_until_it_is_deleted(world: World) -> None:
    world.shares.hold("a", 1000)
    world.now += 10_000
    world.shares.check("a")
    assert world.shares.held("a") == 1000
    world.shares.ended("a", held=1000, kept=300)
    assert world.shares.held("a") == 300
    world.now += 99
    world.shares.ended("b", held=0, kept=1)  # looks at what has left
    assert world.shares.held("a") == 300
    world.now += 1 + 2 * 100 / shares.STEPS
    world.shares.ended("b", held=0, kept=1)
    assert world.shares.held("a") == 0


def test_results_that_are_kept_for_ever_count_for_ever(world: World) -> None:
    """`result_retention_s = inf` keeps them."""
    held = DiskShares(requests_s=float("inf"), agents_s=float("inf"), clock=lambda: world.now)
    held.hold("a", 1000)
    held.ended("a", held=1000, kept=300)
    held.keep_agents("a", 5)
    world.now += 1e9
    held.check("a")
    assert held.held("a") == 305


def test_each_kind_of_row_counts_for_its_own_time(world: World) -> None:
    world.shares.keep_agents("a", 1)
    world.shares.keep_session("a", 10)
    for later, left in ((900, 11), (200, 10), (shares.SESSIONS_S * 1.1, 0)):
        world.now += later
        world.shares.ended("b", held=0, kept=1)
        assert world.shares.held("a") == left


def test_what_is_kept_in_memory_does_not_grow_with_requests(world: World) -> None:
    for _ in range(20_000):
        world.now += 0.1
        world.shares.hold("a", 1)
        world.shares.ended("a", 1, 1)
    assert len(world.shares._leaving) <= shares.STEPS + 2
    assert 1000 <= world.shares.held("a") <= 1100


def test_saves_are_summed_only_on_a_disk_that_is_nearly_full(world: World) -> None:
    disk = SavesDisk(Path("/nowhere/yet"), SPARE)
    world.used = SHARE * world.free - 1
    assert disk.tight() is None
    world.used += 1
    assert disk.tight() == world.free
