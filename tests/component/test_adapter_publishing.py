"""A save for sampling, and an adapter out of use: which calls the engine makes to vLLM, and in which order."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from adapter_hosts import UnreachableHost
from engine_harness import Harness, Trainer, files_in, harness_in, until
from fake_upstream import LOAD, FakeUpstream, Received, Reply, after, error, fake_upstream, hang_up
from replicas import GONE, TIMEOUTS, UNLOAD, WELL, group_of, set_replies

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
    """An engine, the group of its one inference server, and one model."""
    async with fake_upstream() as upstream, harness_in(state_dir) as harness:
        set_replies(upstream)
        replica = Replica(
            "vllm",
            Addresses.same(upstream.url),
            "key",
            host or SharedDirectory(lambda: state_dir, harness.checkpoint_store, in_no_checkpoint),
            TIMEOUTS,
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


async def test_vllm_loads_an_adapter_from_complete_files_before_its_save_is_committed(tmp_path: Path) -> None:
    """A client that reads the result samples at once, so vLLM must already have the version."""
    go = asyncio.Event()
    seen: list[set[str]] = []

    async def read_files_and_rows(request: Received, writer: asyncio.StreamWriter) -> None:
        seen.append(set(files_in(request.json["lora_path"])))
        await after(go, WELL)(request, writer)

    async with world_in(tmp_path / "state") as here:
        here.upstream.controls[LOAD] = read_files_and_rows
        save = await here.trainer.send(Kind.SAVE_WEIGHTS_FOR_SAMPLER, path="first")
        await until(lambda: bool(seen))
        assert seen == [{"adapter_config.json", "adapter_model.safetensors"}]
        assert here.version() == 0
        assert here.harness.checkpoint_rows(here.trainer.model_id) == []
        other = await Trainer.create(here.harness)
        await other.step(1)  # other models train while vLLM loads
        assert here.version() == 0
        go.set()
        await here.trainer.result(save)
        assert here.version() == 1
        (row,) = here.harness.checkpoint_rows(here.trainer.model_id)
        assert here.asked_for(LOAD) == [row.weights.name]


@pytest.mark.parametrize("load", [error(400, "no slot is free"), error(500, "broken"), hang_up])
async def test_a_save_succeeds_and_logs_a_warning_when_vllm_cannot_load_its_adapter(
    tmp_path: Path, load: Reply, caplog: pytest.LogCaptureFixture
) -> None:
    async with world_in(tmp_path / "state") as here:
        here.upstream.controls[LOAD] = load
        await here.trainer.do(Kind.SAVE_WEIGHTS_FOR_SAMPLER, path="first")
        (row,) = here.harness.checkpoint_rows(here.trainer.model_id)
        assert f"adapter {row.weights.name} was saved but not loaded yet" in caplog.text
        assert here.version() == 1


async def test_a_save_succeeds_and_logs_a_warning_when_its_files_cannot_be_brought_to_the_replica(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with world_in(tmp_path / "state", UnreachableHost()) as here:
        await here.trainer.do(Kind.SAVE_WEIGHTS_FOR_SAMPLER, path="first")
        (row,) = here.harness.checkpoint_rows(here.trainer.model_id)
        assert f"adapter {row.weights.name} was saved but not loaded yet" in caplog.text
        assert "OSError: no route to 10.0.0.7" in caplog.text
        assert here.version() == 1


async def test_a_server_that_is_not_ready_gets_no_load_call(tmp_path: Path) -> None:
    async with world_in(tmp_path / "state") as here:
        set_replies(here.upstream, GONE)
        await until(lambda: not here.group.ready)
        await here.trainer.do(Kind.SAVE_WEIGHTS_FOR_SAMPLER, path="first")
        assert here.asked_for(LOAD) == []


async def test_an_adapter_is_unloaded_before_its_files_are_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM reads the directory of an evicted adapter again, and dies if the directory is gone."""
    monkeypatch.setattr(reclaim, "GRACE_S", -60.0)  # so that no file is too young to be deleted
    async with world_in(tmp_path / "state") as here:
        saved = await here.trainer.do(Kind.SAVE_WEIGHTS_FOR_SAMPLER, sampling_session_seq_id=0)
        sampler = here.harness.database.read(lambda c: find_sampler(c, saved["sampling_session_id"]))
        assert sampler is not None
        assert isinstance(sampler.weights, AdapterVersion)
        directory = here.harness.adapter(sampler.weights)
        files_found: list[tuple[str, bool]] = []

        def noting(answer: Reply) -> Reply:
            async def note(request: Received, writer: asyncio.StreamWriter) -> None:
                files_found.append((json.loads(request.body)["lora_name"], bool(files_in(directory))))
                await answer(request, writer)

            return note

        here.upstream.controls[UNLOAD] = noting(error(500, "not now"))
        await here.harness.end(here.trainer.session)
        await here.harness.sweep()
        assert files_found == [(sampler.weights.name, True)]
        assert files_in(directory), "the files stay while the adapter cannot be unloaded"
        here.upstream.controls[UNLOAD] = noting(WELL)
        await here.harness.sweep()
        assert files_found == [(sampler.weights.name, True)] * 2
        assert not files_in(directory)


async def test_a_silent_server_gets_one_unload_call_per_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An unload call may wait a minute for its answer. With hundreds of adapters to unload, the sweep would do nothing
    else."""
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
