"""An engine with one scripted inference server and one model that has trained a step, for tests of saves to sample
from."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine_harness import Harness, Trainer, harness_in, until
from fake_upstream import FakeUpstream, fake_upstream
from replicas import TIMEOUTS, group_of, set_replies

from skyrl.inference.adapter_host import AdapterHost
from skyrl.inference.engine_group import EngineGroup
from skyrl.inference.replica import Addresses, Replica


@dataclass
class World:
    harness: Harness
    upstream: FakeUpstream
    group: EngineGroup
    trainer: Trainer

    def asked_for(self, path: str) -> list[dict[str, str]]:
        """The bodies of the requests to this path of the inference server."""
        return [request.json for request in self.upstream.requests if request.path == path]


@asynccontextmanager
async def world_in(state_dir: Path, host: Callable[[Harness], AdapterHost], **flags: Any) -> AsyncIterator[World]:
    """`host` makes the host that brings adapters to the inference server."""
    async with fake_upstream() as upstream, harness_in(state_dir, **flags) as harness:
        set_replies(upstream)
        group, published = group_of(Replica("vllm", Addresses.same(upstream.url), "key", host(harness), TIMEOUTS))
        watching = asyncio.create_task(group.run())
        await until(lambda: published == [upstream.url])
        await harness.start(group=group)
        trainer = await Trainer.create(harness)
        await trainer.step(1)
        yield World(harness, upstream, group, trainer)
        await harness.stop()
        await group.close()
        await watching
