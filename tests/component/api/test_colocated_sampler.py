"""Samples that the engine runs itself: vLLM is awake for samples only, cancelled samples do not run, and a vLLM that
dies asleep delays samples only."""

from __future__ import annotations

import asyncio
import base64
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from colocated_world import LIMITS, NEVER_S, world
from engine_harness import until
from fake_upstream import COMPLETIONS
from replicas import SOON_S, group_of
from sqlalchemy import select
from test_forwarding_pictures import IMAGE, generated, requests

from skyrl.base.pictures.picture import digest_of
from skyrl.base.pictures.places import KnownPicture
from skyrl.base.pictures.vision import VisionConfig
from skyrl.engine.colocated_sampling import ColocatedSampler
from skyrl.sampling import pictures as generation
from skyrl.sampling.service import CANCELLED
from skyrl.storage.db import pictures
from skyrl.storage.db.pictures import CheckedFile
from skyrl.storage.db.usage import usage

FILE = b"\x89PNG\r\n\x1a\n of a test"
TURN = ["/wake_up", "sample", "/sleep"]


async def test_cancelled_samples_are_not_run_and_the_others_are_counted(tmp_path: Path) -> None:
    async with world(tmp_path / "state") as here:
        harness, vllm = here.harness, here.vllm
        vllm.may_answer.clear()
        first = await here.sample(prompt=[5, 6, 7], num_samples=2)
        await until(lambda: "sample" in vllm.turns)
        kept, cancelled = [await here.sample(prompt=[5, 6, 7], num_samples=2) for _ in range(2)]
        await harness.queued(2)  # the engine has read both samples and has begun neither
        assert await harness.store.end(cancelled, CANCELLED)
        vllm.may_answer.set()
        for request_id in (first, kept):
            assert await here.error_of(request_id) is None
        assert await harness.outcome(cancelled) == CANCELLED
        await until(lambda: vllm.asleep)
        assert vllm.turns == TURN * 2
        counted = Counter[str]()
        for row in harness.database.read(lambda c: c.execute(select(usage)).all()):
            if row.kind.startswith("sampling_"):
                assert (row.tenant, row.session_id, row.base_model) == ("tenant", here.sampler.session_id, "tiny")
                counted[row.kind] += row.amount
        assert counted == {"sampling_prefill": 2 * 3, "sampling_sample": 2 * 2 * 3}


async def test_a_sample_about_a_picture_has_its_file_from_the_database(tmp_path: Path) -> None:
    sight = VisionConfig("qwen3_vl", IMAGE, patch=16, merge=2, min_pixels=32 * 32, max_pixels=256 * 256)
    async with world(tmp_path / "state", sight=sight) as here:
        here.vllm.upstream.controls[generation.PATH] = generated(6)
        digest = digest_of(FILE)
        new = {digest: CheckedFile(KnownPicture("png", 64, 96), FILE)}
        here.harness.database.write(lambda c: pictures.keep(c, here.sampler.tenant, "r", new, new, 2**30))
        named = {"location": f"sha256:{digest}", "format": "png"}
        request_id = await here.sample(prompt={"chunks": [{"tokens": [5]}, named, {"tokens": [6]}]})
        assert await here.error_of(request_id) is None
        (sent,) = requests(here.vllm.upstream)
        assert sent["token_ids"] == [5, IMAGE, 6]
        (part,) = sent["content_parts"]
        assert base64.b64decode(part["url"].partition(",")[2]) == FILE
        unknown = {"location": f"sha256:{'0' * 64}", "format": "png"}
        error = await here.error_of(await here.sample(prompt={"chunks": [{"tokens": [5]}, unknown]}))
        assert error == "prompt.chunks[1]: is not stored on this server any more; send the file"


async def test_waiting_samples_run_in_one_turn_and_vllm_sleeps_while_models_train(tmp_path: Path) -> None:
    async with world(tmp_path / "state") as here:
        here.vllm.may_answer.clear()
        first = await here.sample()
        await until(lambda: "sample" in here.vllm.turns)
        others = [await here.sample() for _ in range(3)]
        await here.harness.queued(3)
        here.vllm.may_answer.set()
        for request_id in (first, *others):
            assert await here.error_of(request_id) is None
        await until(lambda: here.vllm.asleep)
        await here.trainer.step(1)
        assert here.vllm.turns == [*TURN, "/wake_up", *["sample"] * 3, "/sleep"]


async def test_vllm_stays_asleep_if_all_waiting_samples_were_cancelled(tmp_path: Path) -> None:
    async with world(tmp_path / "state") as here:
        here.vllm.may_answer.clear()
        first = await here.sample()
        await until(lambda: "sample" in here.vllm.turns)
        cancelled = await here.sample()
        await here.harness.queued(1)
        assert await here.harness.store.end(cancelled, CANCELLED)
        here.vllm.may_answer.set()
        assert await here.error_of(first) is None
        await here.trainer.step(1)
        await until(lambda: not here.harness.scheduler.waiting)
        assert here.vllm.turns == TURN


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
