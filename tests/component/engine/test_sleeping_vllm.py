"""vLLM dies while it sleeps, is put to sleep or is woken by the engine: samples wait and training goes on."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from colocated_world import LIMITS, NEVER_S, world
from engine_harness import until
from fake_upstream import COMPLETIONS
from replicas import SOON_S, group_of

from skyrl.engine.colocated_sampling import ColocatedSampler


@pytest.mark.parametrize("watching_s", [SOON_S, NEVER_S], ids=["noticed by the watch", "noticed by the wake-up"])
async def test_a_vllm_that_dies_asleep_delays_samples_only(tmp_path: Path, watching_s: float) -> None:
    async with world(tmp_path / "state", watching_s=watching_s) as here:
        assert await here.error_of(await here.sample()) is None
        await until(lambda: here.vllm.asleep)
        here.vllm.dead = True
        here.vllm.requested_paths.clear()
        if watching_s == SOON_S:
            await until(lambda: not here.group.ready)
        waiting = await here.sample()
        if watching_s == NEVER_S:
            await until(lambda: "/wake_up" in here.vllm.requested_paths)
        await here.trainer.step(1)
        assert await here.pending(waiting)
        here.vllm.start_again()
        assert await here.error_of(waiting) is None
        await here.trainer.step(2)


@pytest.mark.parametrize("victim", ["/wake_up", "/sleep"])
async def test_a_vllm_that_dies_when_woken_or_put_to_sleep_loses_nothing(tmp_path: Path, victim: str) -> None:
    async with world(tmp_path / "state") as here:
        here.vllm.dies_of = victim
        first = await here.sample()
        await until(lambda: here.vllm.dead)
        await here.trainer.step(1)
        here.vllm.start_again()
        assert await here.error_of(first) is None
        assert await here.error_of(await here.sample()) is None


async def test_samples_fail_with_a_reason_if_vllm_stays_down(tmp_path: Path) -> None:
    async with world(tmp_path / "state", give_up_after_s=0.0) as here:
        here.vllm.dead = True
        error = await here.error_of(await here.sample())
        assert error is not None
        assert error.startswith("gave up after 0 s: vLLM")
        await here.trainer.step(1)
        here.vllm.start_again()
        await until(lambda: here.group.ready)
        assert await here.error_of(await here.sample()) is None


def test_each_absence_is_measured_from_its_own_start(monkeypatch: pytest.MonkeyPatch) -> None:
    now, group = 0.0, SimpleNamespace(ready=False, reason="gone")
    monkeypatch.setattr("skyrl.engine.colocated_sampling.time", SimpleNamespace(monotonic=lambda: now))
    unused: Any = None
    options: Any = {"sight": unused, "sleeps": True, "give_up_after_s": 10.0}
    sampler = ColocatedSampler(unused, unused, cast(Any, group), LIMITS, "tiny", **options)
    assert not sampler.may_run
    now, group.ready = 5.0, True
    assert sampler.may_run
    now, group.ready = 100.0, False
    assert not sampler.may_run, "the absence begins now, not at the start"
    now = 109.0
    assert not sampler.may_run
    now = 110.0
    assert sampler.may_run, "waiting samples may run, and fail"


async def test_an_engine_that_finds_vllm_asleep_neither_samples_nor_wakes_it(tmp_path: Path) -> None:
    """An engine that restarts after its death finds vLLM asleep. Waking vLLM could take the memory that the trainer
    needs."""
    async with world(tmp_path / "state") as here:
        assert await here.error_of(await here.sample()) is None
        await until(lambda: here.vllm.asleep)
        here.vllm.requested_paths.clear()
        group, _ = group_of(here.vllm.upstream.url, watching_s=1.0)
        watching = asyncio.create_task(group.run())
        await until(lambda: group.ready)
        assert here.vllm.asleep
        assert not set(here.vllm.requested_paths) & {COMPLETIONS, "/wake_up"}
        await group.close()
        await watching
