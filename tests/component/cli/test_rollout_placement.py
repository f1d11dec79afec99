"""The placement process of `skyrl rollout` and a real router: which sidecars the router has, and which have old
weights."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engine_harness import until
from fake_upstream import FakeUpstream, Received, Reply, fake_upstream, hang_up, reply

from skyrl.cli.ray_placement import rollout_plane as plane
from skyrl.cli.ray_placement.rollout_plane import REGISTERED, UPDATED, Workers
from skyrl.inference.remote.sidecar import PATH
from tests.component.router_world import RunningRouter, running_router

PROBED = {"health_check_interval_s": 0.05, "health_check_failure_threshold": 1}


@dataclass
class FakeSidecar:
    """A sidecar beside a vLLM. It is not healthy while it knows that its weights are old."""

    upstream: FakeUpstream
    starting: bool = False
    updated: bool = False
    is_old: bool = False
    told: list[bool] = field(default_factory=list)
    """The answer to each question whether it was updated."""

    def __post_init__(self) -> None:
        self.upstream.controls["/health"] = self._health
        self.upstream.controls[PATH] = self._placed

    async def _health(self, request: Received, writer: asyncio.StreamWriter) -> None:
        answer: Reply = hang_up if self.starting else reply(503 if self.is_old else 200, {})
        await answer(request, writer)

    async def _placed(self, request: Received, writer: asyncio.StreamWriter) -> None:
        if request.method == "POST":
            self.is_old = not self.updated
        else:
            self.told.append(self.updated)
        await reply(200, {"updated": self.updated})(request, writer)

    def update(self) -> None:
        self.updated, self.is_old = True, False


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plane, "POLL_S", 0.02)


@asynccontextmanager
async def served(workers: Workers, sidecar: FakeSidecar) -> AsyncIterator[None]:
    server: Any = SimpleNamespace(name="vllm-0", sidecar_url=sidecar.upstream.url)
    task = asyncio.create_task(workers.serve(server, "http://vllm"))
    try:
        yield
    finally:
        await stopped(task)


async def stopped(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def states(router: RunningRouter) -> dict[str, str]:
    listed: Any = router.app.status()["workers"]
    return {worker["url"]: worker["state"] for worker in listed}


async def test_a_sidecar_is_used_once_it_is_healthy_and_leaves_with_its_server(tmp_path: Path) -> None:
    async with fake_upstream() as upstream, running_router(**PROBED) as router:
        workers, sidecar = Workers(router.url, None, tmp_path), FakeSidecar(upstream, starting=True)
        async with served(workers, sidecar):
            await asyncio.sleep(0.1)
            assert states(router) == {}
            sidecar.starting = False
            await until(lambda: states(router) == {upstream.url: "healthy"})
        assert states(router) == {}
        await workers.close()


async def test_a_server_that_starts_after_an_update_waits_for_the_next_one(tmp_path: Path) -> None:
    async with fake_upstream() as one, fake_upstream() as other, running_router(**PROBED) as router:
        workers, first, second = Workers(router.url, None, tmp_path), FakeSidecar(one), FakeSidecar(other)
        async with served(workers, first):
            await until(lambda: states(router) == {one.url: "healthy"})
            first.update()
            await until(lambda: (tmp_path / UPDATED).exists())
        async with served(workers, second):
            await until(lambda: states(router) == {other.url: "quarantined"})
            assert second.is_old
            second.is_old = False  # the sidecar was started again, and has forgotten it
            await until(lambda: second.is_old)
            second.update()
            await until(lambda: states(router) == {other.url: "healthy"})
            assert not second.is_old
        await workers.close()


async def test_a_server_that_runs_without_the_first_update_is_out_of_use_until_it_gets_one(tmp_path: Path) -> None:
    async with fake_upstream() as one, fake_upstream() as other, running_router(**PROBED) as router:
        workers, first, second = Workers(router.url, None, tmp_path), FakeSidecar(one), FakeSidecar(other)
        async with served(workers, first), served(workers, second):
            await until(lambda: states(router) == {one.url: "healthy", other.url: "healthy"})
            first.update()
            await until(lambda: states(router) == {one.url: "healthy", other.url: "quarantined"})
            second.update()
            await until(lambda: states(router) == {one.url: "healthy", other.url: "healthy"})
            await until(lambda: second.told[-2:] == [True, True])  # it asks again once it has read the first answer
            second.updated = False  # the sidecar was started again, and its vLLM has the new weights
            await until(lambda: second.told[-2:] == [False, False])
            assert not second.is_old
        await workers.close()


async def test_an_update_is_remembered_although_the_disk_is_full(tmp_path: Path) -> None:
    async with fake_upstream() as one, fake_upstream() as other, running_router(**PROBED) as router:
        workers, first = Workers(router.url, None, tmp_path / "no directory"), FakeSidecar(one, updated=True)
        async with served(workers, first), served(workers, second := FakeSidecar(other)):
            await until(lambda: second.is_old)
        await workers.close()


async def test_a_refusal_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with fake_upstream() as upstream, running_router(**PROBED) as router:
        workers, sidecar = Workers(router.url, None, tmp_path), FakeSidecar(upstream)
        refuse, refusals = reply(401, {"error": "the key is wrong"}), 0

        async def refuse_and_count(request: Received, writer: asyncio.StreamWriter) -> None:
            nonlocal refusals
            refusals += 1
            await refuse(request, writer)

        upstream.controls["/health"] = refuse_and_count
        async with served(workers, sidecar):
            await until(lambda: refusals > 2)
        await workers.close()
    [said] = [record.getMessage() for record in caplog.records if record.name == plane.__name__]
    assert said.startswith(f"GET {upstream.url}/health is answered with 401: ")
    assert "the key is wrong" in said


async def test_a_server_whose_end_the_router_was_not_told_is_removed_later(tmp_path: Path) -> None:
    async with fake_upstream() as upstream, running_router(**PROBED) as router:
        workers = Workers(router.url, None, tmp_path)
        removing = asyncio.create_task(workers.remove_left())
        workers._router = "http://127.0.0.1:9"
        async with served(workers, FakeSidecar(upstream)):
            await router.session.post(f"{router.url}/workers", json={"url": upstream.url, "starting": True})
        assert upstream.url in (tmp_path / REGISTERED).read_text(), "the next placement process would remove it"
        workers._router = router.url
        await until(lambda: states(router) == {})
        await stopped(removing)
        await workers.close()


async def test_a_router_that_has_lost_its_workers_is_told_again(tmp_path: Path) -> None:
    async with fake_upstream() as upstream, running_router(**PROBED) as router:
        workers = Workers(router.url, None, tmp_path)
        async with served(workers, FakeSidecar(upstream)):
            await until(lambda: states(router) == {upstream.url: "healthy"})
            router.app.pool.remove(upstream.url, ended=True)
            await until(lambda: states(router) == {upstream.url: "healthy"})
        await workers.close()


async def test_the_next_placement_removes_what_a_killed_one_has_registered(tmp_path: Path) -> None:
    async with fake_upstream() as one, fake_upstream() as other, running_router(**PROBED) as router:
        killed = Workers(router.url, None, tmp_path)
        async with served(killed, FakeSidecar(one)):
            await until(lambda: states(router) == {one.url: "healthy"})
            left = (tmp_path / REGISTERED).read_text()
        await killed.close()
        await router.session.post(f"{router.url}/workers", json={"url": one.url, "starting": True})
        (tmp_path / REGISTERED).write_text(left)
        workers = Workers(router.url, None, tmp_path)
        async with served(workers, FakeSidecar(other)):
            await until(lambda: states(router).get(other.url) == "healthy")
            removing = asyncio.create_task(workers.remove_left())
            await until(lambda: states(router) == {other.url: "healthy"})
            await stopped(removing)
        await workers.close()
