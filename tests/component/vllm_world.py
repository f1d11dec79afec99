"""A real vLLM with the tiny model, started and watched by `skyrl.inference`, for all tests that need no other one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx
import psutil

from skyrl.base.config.loading import load_config
from skyrl.base.config.server import ServerConfig
from skyrl.base.tiny import model_path
from skyrl.base.types.weights import AdapterVersion
from skyrl.inference.engine_group import EngineGroup
from skyrl.inference.placement import LocalPlacement, LocalServer, ServerSpec
from skyrl.inference.remote.settings import CACHE, node_environment
from skyrl.inference.replica import Addresses, CallTimeouts, Replica
from skyrl.inference.vllm_client import VllmClient
from skyrl.inference.vllm_command import plugin_installed, vllm_spec
from skyrl.runtime.processes.ports import free_port

MODEL = model_path()
KEY = "test-key"
CONTEXT = 4096
ADAPTER_RANKS = (8, 32)
"""The server has as many slots: vLLM's CPU code applies the adapter in the last slot to base-model rows."""
HANGS_S = 5.0
"""A server whose health answer takes longer than this three times in a row has hung."""


class ScriptedHost:
    """The host of a server that reads the files of this machine, with the directories that a test sets."""

    copies = False

    def __init__(self) -> None:
        self.directories: dict[AdapterVersion, Path] = {}

    async def bring(self, adapter: AdapterVersion) -> str:
        return str(self.directories[adapter])


@dataclass
class RunningServer:
    """The running server and the URLs that were published for it."""

    config: ServerConfig
    """Adapters may also be loaded from the checkpoint store of this configuration, by references."""
    spec: ServerSpec
    handle: LocalServer
    group: EngineGroup
    replica: Replica
    host: ScriptedHost
    in_use: list[AdapterVersion]
    """The adapters that the replica must load before it is ready."""
    client: VllmClient
    running: asyncio.Task[None]
    warmed_up_by: int
    """How many requests it had done when it was ready."""
    children_s: float
    """The CPU time of the processes that it had started and that had ended when it was ready."""
    published: list[str | None] = field(default_factory=list)


async def until(condition: Callable[[], object], within_s: float) -> None:
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end, "did not come true in time"
        await asyncio.sleep(0.05)


async def _requests_done(url: str) -> int:
    async with httpx.AsyncClient(headers={"Authorization": f"Bearer {KEY}"}, trust_env=False, timeout=None) as http:
        lines = (await http.get(f"{url}/metrics")).text.splitlines()
    return sum(int(float(line.split()[-1])) for line in lines if line.startswith("vllm:request_success_total{"))


def spec_of(config: ServerConfig, directory: Path) -> ServerSpec:
    """A vLLM of this server, which takes its adapters from the checkpoint store and keeps its files in `directory`."""
    spec = vllm_spec(config, free_port(), KEY, cuda=False)
    own = {CACHE: str(directory / "node"), "VLLM_CACHE_ROOT": str(directory / "vllm")}
    return replace(spec, env={**spec.env, **node_environment(config), **own})


@asynccontextmanager
async def running_vllm(logs: Path, state_dir: Path) -> AsyncIterator[RunningServer]:
    """The server, ready. It has the tiny model and a context of `CONTEXT` tokens."""
    assert plugin_installed(), "vLLM does not find the plugin: pip install -e . --no-deps"
    backend = {
        "generator.inference_engine.max_model_len": CONTEXT,
        "generator.inference_engine.engine_init_kwargs": {
            "middleware": "skyrl.inference.remote.middleware.StoredAdapterLoads"
        },
        "trainer.policy.model.lora": {"max_loras": len(ADAPTER_RANKS), "max_cpu_loras": 8, "max_lora_rank": 32},
    }
    config = load_config({"base_model": str(MODEL), "state_dir": state_dir, "backend_config": backend})
    spec = spec_of(config, state_dir)
    handle = LocalPlacement(logs).run(spec, [])
    published: list[str | None] = []
    locked = iter([True])

    async def publish(url: str | None) -> None:
        if next(locked, False):
            raise OSError("the first write fails: database is locked")
        published.append(url)

    host, in_use = ScriptedHost(), list[AdapterVersion]()

    async def adapters() -> list[AdapterVersion]:
        return in_use

    replica = Replica("vllm", Addresses.same(spec.url), KEY, host, CallTimeouts(health_s=HANGS_S, unload_s=HANGS_S))
    group = EngineGroup([replica], publish, adapters, watching_interval_s=0.3, grace_s=400)
    client = VllmClient(spec.url, KEY)
    running = asyncio.create_task(group.run())
    try:
        await until(lambda: group.ready, 400)
        found = await _requests_done(spec.url), psutil.Process(handle.pid).cpu_times().children_user
        yield RunningServer(config, spec, handle, group, replica, host, in_use, client, running, *found, published)
    except AssertionError as error:
        raise AssertionError(f"{error}: {group.reason}\n{handle.log_tail(40)}") from error
    finally:
        await group.close()
        await running
        await client.close()
        await handle.stop()
