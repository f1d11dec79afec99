"""The comparison of a sampler with the trainer: do random adapters change logprobs in both alike?

An inference server may ignore adapters on some layers without a word, or may have been given other weights. Then nobody
would sample what a client trains. Each adapter is loaded into the server by the ordinary route, and the server
computes logprobs of the tokens for which the trainer has computed them (`trainer_probes`, which also judges).

`StartCheck` compares once in the life of a launcher, before training is ready. An engine or a vLLM that is started
again has the options and files of the first one. Several replicas have the same options, so the first that is ready is
compared.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import httpx
import numpy as np

from skyrl.base.config.server import ConfigError
from skyrl.base.types.weights import BaseWeights
from skyrl.engine.threads import EngineThreads
from skyrl.engine.trainer_probes import (
    BaseAgreement,
    Expected,
    Logprobs,
    PicturePrompt,
    Probe,
    TrainerProbes,
    compare_base,
    compare_change,
    compare_seen,
)
from skyrl.inference.adapter_host import AdapterHost, AdapterMissing, AdapterUnavailable
from skyrl.inference.engine_group import EngineGroup
from skyrl.inference.replica import ReplicaState
from skyrl.inference.vllm_client import VllmClient, VllmError
from skyrl.runtime.processes.runtime import Runtime
from skyrl.runtime.processes.startup import NotLoaded
from skyrl.storage.checkpoint_store.base import CheckpointStore
from skyrl.storage.db import full_weights
from skyrl.storage.db.database import Database
from skyrl.trainer.protocol import Backend

logger = logging.getLogger(__name__)

NO_PICTURES = (httpx.codes.FORBIDDEN, httpx.codes.NOT_FOUND)
"""The answers of a vLLM that was started without `--enable-scale-out`, and of one that does not have the route."""
LEAVE_OUT = "generator.inference_engine.compare_with_trainer = false leaves this comparison out"


class SamplerCheck:
    """The check of one start. `run` compares one server: the others are started with the same options."""

    def __init__(self, trainer: Expected, sampler: VllmClient, host: AdapterHost, base_model: str) -> None:
        """`base_model`: its name in the sampler, which is ready."""
        self._trainer = trainer
        self._sampler = sampler
        self._host = host
        self._base_model = base_model
        self._base: Logprobs = np.zeros(0, np.float32)

    async def run(self) -> str:
        """Returns the figures in a sentence. Raises ConfigError when the server computes something else or refuses an
        adapter, and NotLoaded when it gives no answer."""
        began = time.monotonic()
        async with self._answers("the base model"):
            self._base = await self._logprobs(self._base_model)
        base = compare_base(self._trainer.base, self._base)
        if not base.agrees:
            raise ConfigError(
                f"base_model: vLLM's logprobs of the base model differ from the trainer's by {base.difference:.2g} (a "
                f"median over {len(self._base)} tokens; {base.allowed:.2g} is allowed), so vLLM serves other "
                f"weights or computes another model; {LEAVE_OUT}"
            )
        figures = f"the base model's logprobs are at most {base.largest:.2g} apart"
        if self._trainer.picture is not None and self._trainer.seen is not None:
            figures += await self._compare_picture(self._trainer.picture, self._trainer.seen, base)
        parts = {probe.layers: await self._part(probe) for probe in self._trainer.probes}
        if compared := {layers: part for layers, part in parts.items() if part is not None}:
            least = min(compared, key=compared.__getitem__)
            figures += (
                f", and of the changes by {len(compared)} adapters at least {compared[least]:.1%} is the same ({least})"
            )
        return f"{figures}; the comparison took {time.monotonic() - began:.2f} s"

    async def _compare_picture(self, prompt: PicturePrompt, expected: Logprobs, base: BaseAgreement) -> str:
        """The figure for the text behind a picture. Raises as `run`."""
        try:
            async with self._answers("the base model with a picture"):
                sampled = await self._sampler.logprobs_behind(
                    self._base_model, prompt.token_ids, prompt.file, len(expected)
                )
        except ConfigError as error:
            if isinstance(error.__cause__, VllmError) and error.__cause__.status in NO_PICTURES:
                logger.warning("vLLM takes no pictures, so requests with images will fail: %s", error.__cause__)
                return ""
            raise
        seen = compare_seen(expected, np.asarray(sampled, np.float32), base)
        if not seen.agrees:
            raise ConfigError(
                f"base_model: vLLM's logprobs of the text behind a picture differ from the trainer's by "
                f"{seen.difference:.2g} (a median over {len(expected)} tokens; {seen.allowed:.2g} is allowed), so "
                f"vLLM has another vision tower or another image processor; {LEAVE_OUT}"
            )
        return f", behind a picture {seen.largest:.2g}"

    async def _part(self, probe: Probe) -> float | None:
        """Which part of an adapter's change of logprobs is the same in both; None if it changes too little to tell."""
        name = probe.adapter.name
        async with self._answers(f"an adapter on {probe.layers}"):
            await self._sampler.load_adapter(name, await self._host.bring(probe.adapter))
            sampled = await self._logprobs(name)
            await self._sampler.unload_adapter(name)
        change = compare_change(self._trainer.base, probe.logprobs, self._base, sampled)
        if not change.decides:
            logger.warning(
                "the comparison of vLLM with the trainer does not cover %s: a random adapter on it changes the "
                "trainer's logprobs by %.2g, which rounding hides",
                probe.layers,
                change.in_trainer,
            )
            return None
        if not change.agrees:
            how = "ignores it" if change.is_ignored else f"adds something else, {change.difference:.2g} apart"
            raise ConfigError(
                f"base_model: a random adapter on {probe.layers} changes the trainer's logprobs by "
                f"{change.in_trainer:.2g} and vLLM's by {change.in_sampler:.2g} (medians over {len(sampled)} tokens): "
                f"vLLM {how}, so nobody would sample what these layers learn; {LEAVE_OUT}"
            )
        return change.part

    async def _logprobs(self, model: str) -> Logprobs:
        return np.asarray(await self._sampler.prompt_logprobs(model, self._trainer.tokens.tolist()), np.float32)

    @asynccontextmanager
    async def _answers(self, what: str) -> AsyncIterator[None]:
        """Raise ConfigError when vLLM refuses what the block asks for, and NotLoaded when it cannot answer now. vLLM
        sends 500 for adapters that it cannot load, too; then it works on."""
        try:
            yield
        except VllmError as error:
            if await self._is_refusal(error.status):
                raise ConfigError(
                    f"base_model: vLLM refuses what clients would ask it for ({what}): {error}; {LEAVE_OUT}"
                ) from error
            raise NotLoaded(f"vLLM fails when it is compared with the trainer ({what}): {error}") from error
        except (httpx.HTTPError, AdapterMissing, AdapterUnavailable) as error:
            cause = str(error) or type(error).__name__
            raise NotLoaded(f"vLLM gives no answer when it is compared with the trainer ({what}): {cause}") from error

    async def _is_refusal(self, status: int) -> bool:
        """Whether the same request would be answered with this status again."""
        if status == httpx.codes.INTERNAL_SERVER_ERROR:
            return await self._sampler.health() is not None
        return status < 500 and status not in (httpx.codes.REQUEST_TIMEOUT, httpx.codes.TOO_MANY_REQUESTS)


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
            client = VllmClient(url, self._key, timeout_s=ANSWER_S)
            try:
                base_name = self._runtime.config.served_names[0]
                found = await SamplerCheck(self._expected, client, self._host, base_name).run()
            finally:
                await client.close()
        finally:
            await self._threads.on_files(self._trainer.remove)
        logger.info("vLLM and the trainer agree: %s; the trainer's part took %.2f s", found, self._took_s)
        await asyncio.to_thread(self._passed.touch)

    @property
    def _key(self) -> str:
        own, external = self._runtime.inference_api_key, self._runtime.config.external_inference_api_key
        return (own if self._group is not None else external) or ""

    async def _ready_url(self) -> str:
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
