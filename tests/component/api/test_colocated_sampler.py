"""Samples that the engine runs itself: vLLM is awake for samples only, cancelled samples do not run, and usage counts
the samples that ran."""

from __future__ import annotations

import base64
from collections import Counter
from pathlib import Path

from colocated_world import world
from engine_harness import until
from sqlalchemy import select
from test_forwarding_pictures import IMAGE, generated, requests

from skyrl.base.pictures.picture import digest_of
from skyrl.base.pictures.places import KnownPicture
from skyrl.base.pictures.vision import VisionConfig
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
