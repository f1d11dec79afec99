"""When the sampler is compared with the trainer: once in the life of a launcher, before training is ready.

An engine or a vLLM that is started again has the options and files of the first one. Several replicas have the same
options, so the first that is ready is compared. Knows nothing of how both are compared (`sampler_check`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from skyrl.base.types.weights import BaseWeights
from skyrl.inference.adapter_host import AdapterHost
from skyrl.inference.engine_group import EngineGroup
from skyrl.inference.replica import ReplicaState
from skyrl.inference.vllm_client import VllmClient
from skyrl.runtime.processes.runtime import Runtime
from skyrl.runtime.processes.startup import NotLoaded
from skyrl.storage.checkpoint_store.base import CheckpointStore
from skyrl.storage.db import full_weights
from skyrl.storage.db.database import Database
from skyrl.trainer.protocol import Backend
from skyrl.training.engine.sampler_check import SamplerCheck
from skyrl.training.engine.threads import EngineThreads
from skyrl.training.engine.trainer_probes import Expected, TrainerProbes

logger = logging.getLogger(__name__)

COMPARED = "compared-with-trainer"
"""The file of a base model in the launcher's private directory that says that the comparison has passed."""
LOOK_S = 0.1
ANSWER_S = 300.0
"""How long vLLM may take to answer. It may compile its kernels for adapters first."""


class StartCheck:
    """Call `prepare` before any model is created, then `run` before training is ready."""

    def __init__(
        self,
        runtime: Runtime,
        backend: Backend,
        threads: EngineThreads,
        store: CheckpointStore,
        host: AdapterHost,
        group: EngineGroup | None,
    ) -> None:
        self._runtime = runtime
        self._threads = threads
        self._host = host
        self._group = group
        self._passed = runtime.directory / runtime.config.role.process(COMPARED)
        self._trainer = TrainerProbes(runtime.config, backend, store)
        self._expected: Expected | None = None
        self._took_s = 0.0

    async def prepare(self, database: Database) -> None:
        """Let the trainer compute and save what is compared, if a comparison is due. Raises NotLoaded when it cannot:
        another start may have more memory or disk space."""
        if not self._is_wanted or self._passed.exists():
            return
        own = self._runtime.config.role.own
        if not isinstance(await database.read_async(lambda c: full_weights.current(c, own)), BaseWeights):
            logger.info("vLLM is not compared with the trainer: it serves a model in training, not the base model")
            return
        began = time.monotonic()
        try:
            self._expected = await self._threads.on_backend(self._trainer.run)
        except Exception as error:  # logged, and said in the error
            logger.exception("making adapters for the comparison with vLLM failed")
            await self._threads.on_files(self._trainer.remove)
            cause = f"{type(error).__name__}: {error}"
            raise NotLoaded(f"the trainer cannot make adapters to compare vLLM with it: {cause}") from error
        self._took_s = time.monotonic() - began

    @property
    def _is_wanted(self) -> bool:
        config = self._runtime.config
        wanted = config.backend_config.inference.compare_with_trainer
        if self._group is None:
            return bool(wanted) and config.external_inference_url is not None
        return wanted is not False

    async def run(self, publish: Callable[[str], None]) -> None:
        """Wait for a server, and compare it. `publish` writes what the engine waits for. Raises as
        `SamplerCheck.run`."""
        if self._expected is None:
            return
        try:
            await asyncio.to_thread(publish, "waiting for vLLM, to compare it with the trainer")
            url = await self._ready_url()
            await asyncio.to_thread(publish, "comparing vLLM with the trainer")
            found = await self._compared(url, self._expected)
        finally:
            await self._threads.on_files(self._trainer.remove)
        logger.info("vLLM and the trainer agree: %s; the trainer's part took %.2f s", found, self._took_s)
        await asyncio.to_thread(self._passed.touch)

    async def _compared(self, url: str, expected: Expected) -> str:
        client = VllmClient(url, self._key, timeout_s=ANSWER_S)
        try:
            return await SamplerCheck(expected, client, self._host, self._runtime.config.served_names[0]).run()
        finally:
            await client.close()

    @property
    def _key(self) -> str:
        own, external = self._runtime.inference_api_key, self._runtime.config.external_inference_api_key
        return (own if self._group is not None else external) or ""

    async def _ready_url(self) -> str:
        """The URL of a server that is ready, as soon as there is one."""
        if self._group is not None:
            while not self._group.ready:  # noqa: ASYNC110 - the group sets no event
                await asyncio.sleep(LOOK_S)
            return next(each for each in self._group.replicas if each.state is ReplicaState.READY).addresses.admin
        url = self._runtime.config.external_inference_url
        assert url is not None
        client = VllmClient(url, self._key)
        try:
            while await client.health() is None:  # noqa: ASYNC110 - a server that somebody else runs sets no event
                await asyncio.sleep(LOOK_S)
        finally:
            await client.close()
        return url
