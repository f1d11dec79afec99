"""A save for sampling, and an adapter that nobody needs any more: what the engine asks of vLLM, and in which order."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from adapter_hosts import Away
from engine_harness import Harness, Trainer, files_in, harness_in, until
from fake_upstream import LOAD, FakeUpstream, Received, Reply, after, error, fake_upstream, hang_up
from replicas import BOUNDS, GONE, UNLOAD, WELL, group_of, set_up

from skyrl.db.samplers import find_sampler
from skyrl.engine import reclaim
from skyrl.inference.adapter_host import AdapterHost, SharedDirectory
from skyrl.inference.engine_group import EngineGroup
from skyrl.inference.replica import Addresses, Replica
from skyrl.types.kinds import Kind
from skyrl.types.weights import AdapterVersion


@dataclass
class World:
    harness: Harness
    upstream: FakeUpstream
    group: EngineGroup
    trainer: Trainer

    def version(self) -> int:
        return self.harness.model_row(self.trainer.model_id).sampler_version

    def asked_for(self, path: str) -> list[str]:
        return [request.json["lora_name"] for request in self.upstream.requests if request.path == path]


async def in_no_checkpoint(_: AdapterVersion) -> None:
    return None


@asynccontextmanager
async def world_in(state_dir: Path, host: AdapterHost | None = None) -> AsyncIterator[World]:
    """An engine, the group of its one inference server, and a model."""
    async with fake_upstream() as upstream, harness_in(state_dir) as harness:
        set_up(upstream)
        replica = Replica(
            "vllm",
            Addresses.same(upstream.url),
            "key",
            host or SharedDirectory(lambda: state_dir, harness.checkpoint_store, in_no_checkpoint),
            BOUNDS,
        )
        group, published = group_of(replica)
        watching = asyncio.create_task(group.run())
        await until(lambda: published == [upstream.url])
        await harness.start(group=group)
        trainer = await Trainer.create(harness)
        await trainer.step(1)
        yield World(harness, upstream, group, trainer)
        await harness.stop()
        await group.close()
        await watching


async def test_an_adapter_is_loaded_from_whole_files_before_its_save_is_committed(tmp_path: Path) -> None:
    """Who reads the result samples at once: the version must be there for it."""
    go = asyncio.Event()
    seen: list[set[str]] = []

    async def look(request: Received, writer: asyncio.StreamWriter) -> None:
        seen.append(set(files_in(request.json["lora_path"])))
        await after(go, WELL)(request, writer)

    async with world_in(tmp_path / "state") as here:
        here.upstream.controls[LOAD] = look
        save = await here.trainer.send(Kind.SAVE_WEIGHTS_FOR_SAMPLER, path="first")
        await until(lambda: bool(seen))
        assert seen == [{"adapter_config.json", "adapter_model.safetensors"}]
        assert here.version() == 0
        assert here.harness.checkpoint_rows(here.trainer.model_id) == []
        other = await Trainer.create(here.harness)
        await other.step(1)  # others train while vLLM loads
        assert here.version() == 0
        go.set()
        await here.trainer.result(save)
        assert here.version() == 1
        (row,) = here.harness.checkpoint_rows(here.trainer.model_id)
        assert here.asked_for(LOAD) == [row.weights.name]


@pytest.mark.parametrize("load", [error(400, "no slot is free"), error(500, "broken"), hang_up])
async def test_a_save_whose_adapter_cannot_be_loaded_now_succeeds_and_says_so(
    tmp_path: Path, load: Reply, caplog: pytest.LogCaptureFixture
) -> None:
    async with world_in(tmp_path / "state") as here:
        here.upstream.controls[LOAD] = load
        await here.trainer.do(Kind.SAVE_WEIGHTS_FOR_SAMPLER, path="first")
        (row,) = here.harness.checkpoint_rows(here.trainer.model_id)
        assert f"adapter {row.weights.name} was saved but not loaded yet" in caplog.text
        assert here.version() == 1


async def test_a_save_whose_files_cannot_be_brought_to_the_replica_succeeds_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with world_in(tmp_path / "state", Away()) as here:
        await here.trainer.do(Kind.SAVE_WEIGHTS_FOR_SAMPLER, path="first")
        (row,) = here.harness.checkpoint_rows(here.trainer.model_id)
        assert f"adapter {row.weights.name} was saved but not loaded yet" in caplog.text
        assert "OSError: no route to 10.0.0.7" in caplog.text
        assert here.version() == 1


async def test_a_server_that_is_not_ready_is_not_asked(tmp_path: Path) -> None:
    async with world_in(tmp_path / "state") as here:
        set_up(here.upstream, GONE)
        await until(lambda: not here.group.ready)
        await here.trainer.do(Kind.SAVE_WEIGHTS_FOR_SAMPLER, path="first")
        assert here.asked_for(LOAD) == []


async def test_an_adapter_is_unloaded_before_its_files_are_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM reads the directory of an adapter that it has evicted again, and dies if it is gone."""
    monkeypatch.setattr(reclaim, "GRACE_S", -60.0)  # nothing is too young
    async with world_in(tmp_path / "state") as here:
        saved = await here.trainer.do(Kind.SAVE_WEIGHTS_FOR_SAMPLER, sampling_session_seq_id=0)
        sampler = here.harness.database.read(lambda c: find_sampler(c, saved["sampling_session_id"]))
        assert sampler is not None
        assert isinstance(sampler.weights, AdapterVersion)
        directory = here.harness.adapter(sampler.weights)
        there: list[tuple[str, bool]] = []

        def noting(answer: Reply) -> Reply:
            async def note(request: Received, writer: asyncio.StreamWriter) -> None:
                there.append((json.loads(request.body)["lora_name"], bool(files_in(directory))))
                await answer(request, writer)

            return note

        here.upstream.controls[UNLOAD] = noting(error(500, "not now"))
        await here.harness.end(here.trainer.session)
        await here.harness.sweep()
        assert there == [(sampler.weights.name, True)]
        assert files_in(directory), "it could not be unloaded"
        here.upstream.controls[UNLOAD] = noting(WELL)
        await here.harness.sweep()
        assert there == [(sampler.weights.name, True)] * 2
        assert not files_in(directory)


async def test_a_server_that_does_not_answer_is_asked_once_in_a_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An answer is waited for for a minute: with hundreds of adapters to unload, nothing else would be swept."""
    monkeypatch.setattr(reclaim, "GRACE_S", -60.0)
    async with world_in(tmp_path / "state") as here:
        for number in range(3):
            await here.trainer.do(Kind.SAVE_WEIGHTS_FOR_SAMPLER, sampling_session_seq_id=number)
        here.upstream.controls[UNLOAD] = hang_up
        await here.harness.end(here.trainer.session)
        await here.harness.sweep()
        assert len(here.asked_for(UNLOAD)) == 1
        assert "adapters could not be unloaded yet" in caplog.text
        here.upstream.controls[UNLOAD] = WELL
        await here.harness.sweep()
        assert len(here.asked_for(UNLOAD)) == 4
