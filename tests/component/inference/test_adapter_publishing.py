"""A save for sampling, and an adapter out of use: which calls the engine makes to vLLM, and in which order."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from adapter_hosts import UnreachableHost
from adapter_world import World, world_in
from engine_harness import Harness, Trainer, files_in, until
from fake_upstream import LOAD, Received, Reply, after, error, hang_up
from replicas import GONE, UNLOAD, WELL, set_replies

from skyrl.base.types.requests import Kind
from skyrl.base.types.weights import AdapterVersion
from skyrl.engine import sweeping
from skyrl.inference.adapter_host import AdapterHost, SharedDirectory
from skyrl.storage.db.samplers import find_sampler


async def in_no_checkpoint(_: AdapterVersion) -> None:
    return None


def shared_directory(harness: Harness) -> AdapterHost:
    """The server's own directory: the inference server is on the same machine."""
    return SharedDirectory(lambda: harness.config.state_dir, harness.checkpoint_store, in_no_checkpoint)


def version(here: World) -> int:
    """The newest committed version of the model."""
    return here.harness.model_row(here.trainer.model_id).sampler_version


async def test_a_save_is_answered_while_vllm_loads_its_adapter_from_complete_files(tmp_path: Path) -> None:
    """A sample that comes before the adapter waits for the same load. The model's next version comes after it."""
    go = asyncio.Event()
    seen: list[set[str]] = []

    async def read_files(request: Received, writer: asyncio.StreamWriter) -> None:
        seen.append(set(files_in(request.json["lora_path"])))
        await after(go, WELL)(request, writer)

    async with world_in(tmp_path / "state", shared_directory) as here:
        here.upstream.controls[LOAD] = read_files
        save = await here.trainer.send(Kind.SAVE_WEIGHTS_FOR_SAMPLER, path="first")
        await here.trainer.result(save)
        await until(lambda: bool(seen))
        assert seen == [{"adapter_config.json", "adapter_model.safetensors"}]
        (row,) = here.harness.checkpoint_rows(here.trainer.model_id)
        assert version(here) == row.weights.number == 1
        other = await Trainer.create(here.harness)
        await other.step(1)  # other models train while vLLM loads
        second = await here.trainer.send(Kind.SAVE_WEIGHTS_FOR_SAMPLER, path="second")
        await other.step(2)
        assert (version(here), len(seen)) == (1, 1)
        go.set()
        await here.trainer.result(second)
        await until(lambda: len(seen) == 2)
        assert [asked["lora_name"].rpartition("@")[2] for asked in here.asked_for(LOAD)] == ["1", "2"]


@pytest.mark.parametrize("load", [error(400, "no slot is free"), error(500, "broken"), hang_up])
async def test_a_save_succeeds_and_logs_a_warning_when_vllm_cannot_load_its_adapter(
    tmp_path: Path, load: Reply, caplog: pytest.LogCaptureFixture
) -> None:
    async with world_in(tmp_path / "state", shared_directory) as here:
        here.upstream.controls[LOAD] = load
        await here.trainer.do(Kind.SAVE_WEIGHTS_FOR_SAMPLER, path="first")
        (row,) = here.harness.checkpoint_rows(here.trainer.model_id)
        await until(lambda: f"adapter {row.weights.name} was saved but not loaded yet" in caplog.text)
        assert version(here) == 1


async def test_a_save_succeeds_and_logs_a_warning_when_its_files_cannot_be_brought_to_the_replica(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with world_in(tmp_path / "state", lambda _: UnreachableHost()) as here:
        await here.trainer.do(Kind.SAVE_WEIGHTS_FOR_SAMPLER, path="first")
        (row,) = here.harness.checkpoint_rows(here.trainer.model_id)
        await until(lambda: f"adapter {row.weights.name} was saved but not loaded yet" in caplog.text)
        assert "OSError: no route to 10.0.0.7" in caplog.text
        assert version(here) == 1


async def test_a_server_that_is_not_ready_gets_no_load_call(tmp_path: Path) -> None:
    async with world_in(tmp_path / "state", shared_directory) as here:
        set_replies(here.upstream, GONE)
        await until(lambda: not here.group.ready)
        await here.trainer.do(Kind.SAVE_WEIGHTS_FOR_SAMPLER, path="first")
        assert here.asked_for(LOAD) == []


async def test_an_adapter_is_unloaded_before_its_files_are_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM reads the directory of an evicted adapter again, and dies if the directory is gone."""
    monkeypatch.setattr(sweeping, "GRACE_S", -60.0)  # so that no file is too young to be deleted
    async with world_in(tmp_path / "state", shared_directory) as here:
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
    monkeypatch.setattr(sweeping, "GRACE_S", -60.0)
    async with world_in(tmp_path / "state", shared_directory) as here:
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
