"""New weights for SGLang's servers, and for them beside sidecars: what they are sent, against SGLang's own classes."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch

from skyrl.runtime.processes.ports import listen
from skyrl.weights.changes_on_disk import ChangesOnDisk
from skyrl.weights.disk import CheckpointOnDisk
from skyrl.weights.group import TrainerGroup
from skyrl.weights.protocol import WeightUpdate, publish
from skyrl.weights.shared_memory import NotShared, SharedMemory
from skyrl.weights.workers import NotStaged, PauseMode, VersionOnDisk, Workers, WorkersFailed
from tests.component.router_world import PromptServer, running_router
from tests.component.sglang_server import SglangServer
from tests.component.sidecar_world import RunningSidecar, sidecar_before
from tests.component.updated_vllm import UpdatedVllm, part_of


@contextlib.asynccontextmanager
async def served(app: Any) -> AsyncIterator[str]:
    sockets = listen("127.0.0.1", 0)
    server = PromptServer(app, date_header=False, drain_s=1)
    serving = asyncio.create_task(server.serve(sockets))
    try:
        yield f"http://127.0.0.1:{sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        await serving


@pytest.fixture
def sglang() -> SglangServer:
    return SglangServer()


@pytest.mark.parametrize("pause", ["abort", "retract", "in_place", None])
async def test_an_update_is_loaded_in_the_pause_alone(
    pause: PauseMode | None, sglang: SglangServer, tmp_path: Path
) -> None:
    async with served(sglang.application()) as url:
        sglang.samples = 3
        update = WeightUpdate(VersionOnDisk(Workers([url]), pause))
        await update.begin("7")
        await update.send(tmp_path)
        assert sglang.loaded == [], "it has not been paused yet"
        await update.finish()
        assert sglang.loaded == [(str(tmp_path), pause, "7")]
        paused = ["/pause_generation", "/update_weights_from_disk", "/continue_generation"]
        assert sglang.calls == (paused if pause else paused[1:2])
        assert (sglang.unknown, sglang.mode, sglang.version) == (set(), None, "7")
        assert await Workers([url]).versions() == {url: "7"}


async def test_a_checkpoint_of_its_own_reaches_it(sglang: SglangServer, tmp_path: Path) -> None:
    async with served(sglang.application()) as url:
        await publish(CheckpointOnDisk(Workers([url]), tmp_path), "1", [part_of(1.0)])
        assert [(pause, version) for _, pause, version in sglang.loaded] == [("in_place", "1")]
        assert sglang.unknown == set()
        assert os.listdir(tmp_path) == []
        with pytest.raises(WorkersFailed, match="is no directory") as raised:
            await publish(VersionOnDisk(Workers([url])), "2", [tmp_path / "gone"])
        assert raised.value.refused == {url}
        assert sglang.mode is None


@contextlib.asynccontextmanager
async def both(sglang: SglangServer, directory: Path) -> AsyncIterator[tuple[str, RunningSidecar, UpdatedVllm]]:
    vllm = UpdatedVllm(directory)
    async with served(sglang.application()) as url, sidecar_before(vllm) as sidecar:
        yield url, sidecar, vllm


async def test_sidecars_beside_it_stage_and_all_change_in_one_pause(sglang: SglangServer, tmp_path: Path) -> None:
    async with both(sglang, tmp_path / "first") as (url, sidecar, vllm):
        update = WeightUpdate(CheckpointOnDisk(Workers([url, sidecar.url]), tmp_path))
        await update.begin("5")
        await update.send(part_of(2.0))
        assert (sglang.version, vllm.version) == ("default", "default")
        await update.finish()
        assert (sglang.version, vllm.version, vllm.first) == ("5", "5", 2.0)
        assert sglang.unknown == set()


async def test_media_that_need_sidecars_say_so(sglang: SglangServer, tmp_path: Path) -> None:
    """Before anything is sent that SGLang would load while it samples, or take for a whole model."""
    async with both(sglang, tmp_path / "first") as (url, sidecar, vllm):
        servers = Workers([sidecar.url, url])
        for medium in (TrainerGroup(servers, timeout_s=5), ChangesOnDisk(servers, tmp_path / "changes")):
            with pytest.raises(NotStaged, match=f"{url}: stages no updates"):
                await publish(medium, "1", [part_of(1.0)])
        with pytest.raises(NotShared):
            await publish(SharedMemory(servers), "1", [{"a": torch.zeros(2)}])
        assert (sglang.loaded, vllm.version) == ([], "default")
        assert sglang.calls == []


async def test_the_router_lets_no_staging_reach_it(sglang: SglangServer, tmp_path: Path) -> None:
    async with both(sglang, tmp_path / "first") as (url, sidecar, vllm), running_router() as router:
        for worker in (sidecar.url, url):
            await router.session.post(f"{router.url}/add_worker", json={"url": worker})
        asked = {"model_path": str(tmp_path / "first"), "weight_version": "2"}
        for query, more in (("", {"stage_only": True}), ("?stage_only=true", {}), ("", {"base": "1"})):
            async with router.session.post(
                f"{router.url}/update_weights_from_disk{query}", json=asked | more
            ) as answer:
                refused = await answer.json()
                assert (answer.status, refused["success"]) == (400, False)
                assert f"{url} does not say that it stages updates" in refused["message"]
        assert (sglang.loaded, vllm.version) == ([], "default")
        async with router.session.post(f"{router.url}/update_weights_from_disk", json=asked) as answer:
            assert answer.status == 200, await answer.text()
        assert (sglang.version, vllm.version) == ("2", "2")
        through = VersionOnDisk(Workers([router.url]), "abort")
        with contextlib.suppress(WorkersFailed):  # which worker answers for all is chance
            await through.begin("3")
            await through.send(tmp_path / "first")
        assert sglang.version == "2"


async def test_a_server_that_does_not_say_what_it_is_is_named(tmp_path: Path) -> None:
    gone = "http://127.0.0.1:9"
    with pytest.raises(WorkersFailed, match=gone):
        await publish(VersionOnDisk(Workers([gone])), "1", [tmp_path])
