"""Health probes against real servers that refuse, hang, answer 500, and come back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from small_workers import small_workers

from skyrl.http.forward import BadHead
from skyrl.router.health import HealthProber
from skyrl.router.policies import LeastInFlight
from skyrl.router.pool import Change, WorkerPool
from skyrl.router.worker import Refused, Unreachable, Worker, WorkerState, fetch

SOON_S = 0.01
NEVER_S = 3600.0
THRESHOLD = 2


@asynccontextmanager
async def prober(pool: WorkerPool, interval_s: float = SOON_S, timeout_s: float = 60) -> AsyncIterator[None]:
    probes = HealthProber(pool, interval_s, THRESHOLD, fetch, timeout_s, quarantined_interval_s=SOON_S)
    task = asyncio.create_task(probes.run())
    yield
    assert not task.done()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
def pool() -> WorkerPool:
    return WorkerPool(LeastInFlight())


def reaches(pool: WorkerPool, worker: Worker, state: WorkerState) -> asyncio.Future[None]:
    """Ends at the worker's next change to this state."""
    reached: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def note(changed: Worker, change: Change) -> None:
        if changed is worker and worker.state is state and not reached.done():
            reached.set_result(None)

    pool.subscribe(note)
    return reached


@pytest.mark.parametrize("fault", ["refuses", "answers 500", "hangs"])
async def test_a_server_that_fails_its_probes_is_quarantined_and_revived(pool: WorkerPool, fault: str) -> None:
    async with small_workers(1) as (server,):
        worker = pool.add(server.url)
        if fault == "refuses":
            await server.stop()
        server.hangs = fault == "hangs"
        if fault == "answers 500":
            server.answers["/health"] = (500, b"")
        gone = reaches(pool, worker, WorkerState.QUARANTINED)
        interval_s, timeout_s = (NEVER_S if fault == "refuses" else SOON_S), (SOON_S if fault == "hangs" else 60)
        async with prober(pool, interval_s, timeout_s):
            await gone
            assert (worker.failed_probes < THRESHOLD) == (fault == "refuses"), "a refusal needs no second probe"
            if fault == "hangs":
                return
            back = reaches(pool, worker, WorkerState.HEALTHY)
            server.answers["/health"] = (204, b"")
            if fault == "refuses":
                await server.start()
            await back
            assert (server.got[0].method, server.got[0].target) == ("GET", "/health")


async def test_a_server_that_hangs_holds_up_no_other(pool: WorkerPool) -> None:
    async with small_workers(2) as (hanging, good):
        hanging.hangs = True
        pool.add(hanging.url)
        pool.add(good.url)
        async with prober(pool):
            await hanging.asked(1)
            await good.asked(len(good.got) + 5)
            assert len(hanging.got) == 1, "its first probe still waits"


async def test_a_refused_request_asks_for_a_probe_at_once(pool: WorkerPool) -> None:
    async with small_workers(1) as (server,):
        worker = pool.add(server.url)
        async with prober(pool, interval_s=NEVER_S):
            await server.asked(1)
            back = reaches(pool, worker, WorkerState.HEALTHY)
            pool.refused(worker)
            await back


async def test_a_worker_that_comes_later_is_probed_and_a_forgotten_one_is_not(pool: WorkerPool) -> None:
    async with small_workers(2) as (first, second), prober(pool):
        pool.add(first.url)
        await first.asked(2)
        pool.remove(first.url)
        pool.add(second.url)
        await second.asked(1)
        probes = len(first.got)
        await second.asked(10)
        assert len(first.got) <= probes + 1, "one may have been on its way"


async def test_a_registration_asks_for_a_probe_at_once(pool: WorkerPool) -> None:
    async with small_workers(1) as (server,):
        pool.add(server.url)
        async with prober(pool, interval_s=NEVER_S):
            await server.asked(1)
            pool.add(server.url)
            await server.asked(2)


async def test_both_addresses_must_be_healthy(pool: WorkerPool) -> None:
    async with small_workers(2) as (sidecar, server):
        worker = pool.add(sidecar.url, server.url)
        server.answers["/health"] = (503, b"")
        gone = reaches(pool, worker, WorkerState.QUARANTINED)
        async with prober(pool):
            await gone
            await sidecar.asked(1)
            back = reaches(pool, worker, WorkerState.HEALTHY)
            server.answers["/health"] = (200, b"")
            await back


async def test_a_held_worker_is_not_revived_by_probes(pool: WorkerPool) -> None:
    async with small_workers(2) as (held, other):
        worker = pool.add(held.url, labels={"revive": "registration"})
        pool.add(other.url)
        pool.refused(worker)
        async with prober(pool):
            await held.asked(3)
            assert worker.state is WorkerState.QUARANTINED
            assert worker.answers


async def test_an_answer_over_the_bound_is_none() -> None:
    async with small_workers(1) as (server,):
        server.answers["/"] = (200, b"x" * 11)
        with pytest.raises(Unreachable, match="exceeds 10 bytes"):
            await fetch("GET", f"{server.url}/", (), b"", 60, max_bytes=10)


async def test_a_header_that_would_begin_another_line_is_not_sent() -> None:
    async with small_workers(1) as (server,):
        with pytest.raises(BadHead):
            await fetch("GET", f"{server.url}/", ((b"x-a", b"1\r\nx-b: 2"),), b"", 60)
        assert not server.got


async def test_why_a_server_is_unreachable_is_told() -> None:
    async with small_workers(1) as (server,):
        server.hangs = True
        with pytest.raises(Unreachable, match=r"no answer within 0\.01 s"):
            await fetch("GET", server.url, (), b"", SOON_S)
        await server.stop()
        with pytest.raises(Refused, match="refused|Connect call failed"):
            await fetch("GET", server.url, (), b"", 60)
