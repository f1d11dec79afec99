"""The engine process: loads the backend while vLLM starts, publishes its state, runs the loop, cleans up."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest

from skyrl.base.adapter_files import TRAIN_FLAGS, encode_targets, with_flags
from skyrl.base.config.server import ConfigError, ServerConfig, vision_of
from skyrl.base.model_files import model_config
from skyrl.base.types.context_limits import ContextLimits
from skyrl.base.types.weights import AdapterVersion, LoraSpec
from skyrl.engine.activity import Heartbeat
from skyrl.engine.build import EngineParts, build_engine, held_versions
from skyrl.engine.colocated_sampling import ColocatedSampler
from skyrl.engine.crash_ledger import CrashLedger
from skyrl.engine.metrics import EngineMetrics
from skyrl.engine.publishing import adopt_adapters, adopt_full_weights, version_files
from skyrl.engine.rank_actors import LOADING, RankActors, start_ranks, watch_ranks
from skyrl.engine.recovery import LOOK_S
from skyrl.engine.sampler_check import StartCheck
from skyrl.engine.telemetry import CommandTracing, measuring
from skyrl.engine.threads import EngineSignals
from skyrl.http.client import HttpClient
from skyrl.inference.adapter_host import AdapterHost, SharedDirectory, StoredAdapters
from skyrl.inference.engine_group import EngineGroup
from skyrl.inference.engine_kinds import Vllm
from skyrl.inference.full_weights import FullWeightsOfReplicas, VersionFiles
from skyrl.inference.metrics import AdapterMetrics
from skyrl.inference.placed_replicas import PlacedReplicas
from skyrl.inference.replica import Addresses
from skyrl.inference.router_members import RouterMembers
from skyrl.inference.vllm_command import context_length
from skyrl.runtime.processes.runtime import Runtime, run_process, set_up_process
from skyrl.runtime.processes.startup import NotLoaded
from skyrl.runtime.ray_cluster.connection import connect
from skyrl.runtime.tracing import open_spans
from skyrl.sampling.client import ForwardingClient
from skyrl.sampling.servers import FixedEndpoint
from skyrl.storage.checkpoint_store.base import CheckpointStore
from skyrl.storage.checkpoint_store.registry import open_store
from skyrl.storage.db import adapter_versions, full_weights
from skyrl.storage.db.checkpoints import store_key_of
from skyrl.storage.db.database import Database, Displaced, Fence, FencedDatabase, RetryingDatabase
from skyrl.storage.db.engine_publisher import EngineStatePublisher
from skyrl.storage.db.engine_state import read_state
from skyrl.storage.db.faults import outage
from skyrl.storage.db.pictures import PictureFiles
from skyrl.storage.db.processes import follow_servers
from skyrl.storage.db.repeats import repeat
from skyrl.storage.doorbell import SERVERS, Doorbell, DoorbellListener
from skyrl.trainer import create_backend
from skyrl.trainer.protocol import Backend, DeviceFault, ModelLimits

logger = logging.getLogger(__name__)

IN_USE_S = 600.0
"""Adapters that were sampled from within this time are loaded before a restarted vLLM gets samples."""
RETRY_S = 10.0
"""How often the engine tries to restore held models: their checkpoint store was away, or memory was short."""


def _colocated_sampler(
    runtime: Runtime, database: Database, backend: Backend, group: EngineGroup | None, host: AdapterHost
) -> ColocatedSampler | None:
    """The sampler that runs between turns of training; None where API processes forward samples."""
    if runtime.config.modes.forwards:
        return None
    assert group is not None
    assert runtime.inference_url is not None
    import torch

    client = ForwardingClient(
        HttpClient(),
        FixedEndpoint(runtime.inference_url),
        host,
        api_key=runtime.inference_api_key,
        deadline_s=runtime.config.forwarding_deadline_s,
        zero_fill_logprobs=runtime.config.forwarding_zero_fill_logprobs,
        pictures=PictureFiles(database),
    )
    return ColocatedSampler(
        database,
        client,
        group,
        _sampling_limits(runtime, backend.limits),
        runtime.config.served_names[0],
        sight=vision_of(runtime.config),
        # On a CPU, vLLM's sleep frees no memory and would cost two calls around every batch.
        sleeps=torch.cuda.is_available(),
        give_up_after_s=runtime.config.forwarding_deadline_s,
    )


def layers_text(config: ServerConfig, backend: Backend) -> str:
    """The layers that adapters of this server train, as the engine publishes them. Uploads are checked by them."""
    lora = config.backend_config.lora
    spec = LoraSpec(1, lora.alpha, 0)
    return encode_targets({flag: backend.layers_of(with_flags(spec, [flag])) for flag in TRAIN_FLAGS})


def _sampling_limits(runtime: Runtime, limits: ModelLimits) -> ContextLimits:
    """The trainer's limits, with the sampler's context if that is shorter."""
    context = min(context_length(runtime.config, cuda=runtime.cuda) or limits.max_context, limits.max_context)
    of_model = model_config(runtime.config.base_model_path).get("max_position_embeddings")
    return ContextLimits(limits.vocab_size, context, model_context=of_model)


def _load_backend(config: ServerConfig, ranks: RankActors | None = None) -> Backend:
    """The backend with its base model.

    Raises ConfigError when the model can never be loaded, and NotLoaded when a later try may succeed: other processes
    use the memory, a file system or a model hub is away, or the device has failed.
    """
    gc.disable()  # the import of torch and transformers makes a million objects and no garbage: a fifth of its time
    try:
        return create_backend(config, ranks)
    except ConfigError as error:
        if isinstance(error.__cause__, OSError):  # reading the files, or getting them from the hub, has failed
            raise NotLoaded(str(error)) from error
        raise
    except (Exception, DeviceFault) as error:  # of any library that reads a model: logged, and said in the error
        logger.exception("loading the base model failed")
        cause = f"{type(error).__name__}: {error}"
        raise NotLoaded(f"base_model: cannot load {config.base_model_path}: {cause}") from error
    finally:
        gc.freeze()  # modules and base model live until the end
        gc.enable()


@dataclass
class _Bell:
    """Passes rings on to the parts of the engine that they are for, as soon as there are such parts."""

    on_commands: Callable[[list[str]], None] = lambda _: None
    on_servers: Callable[[], None] = lambda: None

    def ring(self, notices: list[str]) -> None:
        if SERVERS in notices:
            self.on_servers()
        else:
            self.on_commands(notices)


@dataclass
class _Shutdown:
    """Ends the engine on SIGTERM, on SIGINT, and when the claim to the database is lost.

    The running turn ends first, also while the database is away. While the base model is being loaded, the process
    exits at once.
    """

    signals: EngineSignals
    ledger: CrashLedger
    database: RetryingDatabase
    loading: bool = False
    """The base model is being loaded on a thread that cannot be interrupted. Nothing else runs yet."""

    def begin(self) -> None:
        self.ledger.stop_recording()  # the launcher may kill the engine in a long command, which is not to blame
        self.database.stop_retrying()
        if self.loading:
            logger.info("told to stop while the base model was being loaded")
            os._exit(0)
        self.signals.stop()


async def run(runtime: Runtime) -> None:
    """Run the engine until SIGTERM or SIGINT.

    Raises Displaced when another server trains on the database now, BackendLost when the backend has failed for good,
    and DatabaseError when the engine is told to end while the database cannot be used.
    """
    config, loop = runtime.config, asyncio.get_running_loop()
    signals, ledger = EngineSignals(), CrashLedger(config.running_file)
    metrics = EngineMetrics.new(of_server=config.role.scope.has_rest)
    fence = Fence(runtime.server_id, lambda: loop.call_soon_threadsafe(shutdown.begin))
    database = FencedDatabase(config.database, fence)
    shutdown = _Shutdown(signals, ledger, database)
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, shutdown.begin)
    async with AsyncExitStack() as opened:
        opened.callback(database.close)
        unfenced = opened.enter_context(closing(Database(config.database)))
        opened.callback(ledger.close)
        api = opened.enter_context(closing(Doorbell(*runtime.api_doorbells)))
        state = EngineStatePublisher(unfenced, api, fence, config.role.state_keys[0])
        store = open_store(config, metrics.traffic.count)
        host = _adapter_host(config, unfenced, store)
        opened.push_async_callback(asyncio.to_thread, state.clear, "the engine has stopped")
        await asyncio.to_thread(database.confirm_claim)
        died_at = (
            await unfenced.read_async(lambda c: read_state(c, config.role.state_keys[:1]))
        ).heartbeat_at  # 0 unless an engine has died
        await asyncio.to_thread(state.training, ready=False, reason=LOADING)
        await asyncio.to_thread(held_versions(config, store).copy_all)
        await asyncio.to_thread(adopt_adapters, config, database, store)  # before a vLLM may ask for adapters
        if config.full_finetuning:
            await asyncio.to_thread(adopt_full_weights, config, database, store)
        await opened.enter_async_context(measuring(runtime, unfenced, metrics))
        bell = _Bell()
        opened.enter_context(closing(DoorbellListener(runtime.engine_doorbell, bell.ring))).start()
        group, inference_watch = await opened.enter_async_context(
            _inference(runtime, unfenced, state, host, metrics.adapters, bell)
        )
        heartbeat = Heartbeat(state)
        opened.push_async_callback(asyncio.to_thread, heartbeat.stop)
        if signals.is_stopped:  # by a signal: load nothing. By a lost claim: the next line raises Displaced
            await asyncio.to_thread(database.confirm_claim)
            return
        shutdown.loading = True
        ranks, ranks_watch = None, None
        if runtime.ray_address is not None:
            publish = partial(state.training, ready=False)
            ranks = await asyncio.to_thread(start_ranks, config, lambda why: publish(reason=why))
            ranks_watch = asyncio.create_task(watch_ranks(ranks))
            opened.callback(ranks_watch.cancel)
        backend = opened.enter_context(closing(await asyncio.to_thread(_load_backend, config, ranks)))
        shutdown.loading = False
        sampler = _colocated_sampler(runtime, database, backend, group, host)
        if sampler is not None:
            opened.push_async_callback(sampler.close)
        await asyncio.to_thread(database.confirm_claim)  # waits as long as the database is away
        spans = open_spans(config.otlp_endpoint, config.role.process("engine"))
        if spans is not None:
            opened.push_async_callback(asyncio.to_thread, spans.close)
        tracing = CommandTracing(spans)
        parts = build_engine(config, database, backend, store, ledger, api, signals, group, sampler, metrics, tracing)
        bell.on_commands = parts.engine.ring
        opened.push_async_callback(parts.publisher.close)
        heartbeat.activity = lambda: parts.activity.text
        activity_watch = asyncio.create_task(parts.activity.run())
        opened.callback(activity_watch.cancel)
        check = StartCheck(runtime, backend, parts.threads, store, host, group)
        await check.prepare(unfenced)
        await parts.recovery.begin()
        if config.full_finetuning:  # before a client may want the only place
            await asyncio.to_thread(state.training, ready=False, reason="restoring the model in training")
            await parts.recovery.restore_wanted()
        restoring = asyncio.create_task(repeat("restoring models", LOOK_S, parts.recovery.restore_wanted, at_once=True))
        opened.callback(restoring.cancel)
        watches = [watch for watch in (activity_watch, inference_watch, ranks_watch, restoring) if watch is not None]
        await signals.unless_stopped(check.run(lambda why: state.training(ready=False, reason=why)), watches)
        if not signals.is_stopped:
            limits, layers = _sampling_limits(runtime, backend.limits), layers_text(config, backend)
            await asyncio.to_thread(state.training, ready=True, reason="", limits=limits, layers=layers)
            if died_at:
                metrics.phases.recovered(died_at)
        await run_until_stopped(parts, watches)
    if fence.lost:
        raise Displaced("the claim to the database was lost while nothing ran")


def _adapter_host(config: ServerConfig, database: Database, store: CheckpointStore) -> AdapterHost:
    """The host of vLLM, which reads this server's state directory; with Ray, the nodes that fetch adapters."""

    async def store_key(adapter: AdapterVersion) -> str | None:
        return await database.read_async(lambda c: store_key_of(c, adapter))

    if config.weights_travel:
        return StoredAdapters(store, store_key, config.state_dir)
    return SharedDirectory(lambda: config.state_dir, store, store_key)


def _group(
    runtime: Runtime, database: Database, state: EngineStatePublisher, host: AdapterHost, metrics: AdapterMetrics
) -> EngineGroup:
    """The replicas that the launcher runs. Several have a router in front of them. Those on a Ray cluster are added
    later."""
    config, key, url = runtime.config, runtime.inference_api_key or "", runtime.inference_url
    own = config.role.own
    assert url is not None

    async def in_use() -> list[AdapterVersion]:
        """As many adapters as a replica runs at once. The replica loads others when a sample asks for them."""
        limit = config.backend_config.lora.slots
        return await database.read_async(lambda c: adapter_versions.in_use(c, time.time() - IN_USE_S, limit, own))

    async def current_weights() -> VersionFiles:
        return version_files(config, await database.read_async(lambda c: full_weights.current(c, own)))

    weights = None
    if config.full_finetuning:
        weights = FullWeightsOfReplicas(current_weights, key)
    kind = Vllm(config, key)
    addresses = [
        Addresses.same(url, sidecar) for url, sidecar in zip_longest(runtime.replica_urls, runtime.sidecar_urls)
    ]
    replicas = [kind.replica(each, host, metrics) for each in addresses]
    proxy_url, members = (url, RouterMembers(url, key)) if config.routed else (None, None)
    return EngineGroup(
        replicas,
        state.publish_url,
        in_use,
        proxy_url=proxy_url,
        members=members,
        weights=weights,
        has_all=config.ray is None,
    )


@asynccontextmanager
async def _inference(
    runtime: Runtime,
    database: Database,
    state: EngineStatePublisher,
    host: AdapterHost,
    metrics: AdapterMetrics,
    bell: _Bell,
) -> AsyncIterator[tuple[EngineGroup | None, asyncio.Task[None] | None]]:
    """The managed inference servers, and the task that watches them; (None, None) if this server manages none."""
    if runtime.inference_url is None:
        yield None, None
        return
    group = _group(runtime, database, state, host, metrics)
    inference_watch = asyncio.create_task(group.run())
    following = None
    if runtime.config.ray is not None:
        kind = Vllm(runtime.config, runtime.inference_api_key or "")
        placed, rung = PlacedReplicas(group, lambda at: kind.replica(at, host, metrics)), asyncio.Event()
        bell.on_servers = rung.set
        following = asyncio.create_task(follow_servers(database, runtime.placement_owner, rung, placed.follow))
    try:
        yield group, inference_watch
    finally:
        if following is not None:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
        await group.close()
        await asyncio.gather(inference_watch, return_exceptions=True)


async def run_until_stopped(parts: EngineParts, watches: Sequence[asyncio.Task[None]]) -> None:
    """Run the loop until the engine is stopped and its running turn has ended. Meanwhile retry restoring held models.

    Raises the errors of the loop. `watches` and the retries end only by an error, for example when a device breaks
    while a model is restored: that error is raised, too.
    """
    running = asyncio.create_task(parts.engine.run())
    stopping = asyncio.create_task(parts.signals.stopped.wait())
    retrying = asyncio.create_task(repeat("restoring held models", RETRY_S, parts.recovery.retry))
    try:
        endless = [retrying, *watches]
        await asyncio.wait({running, stopping, *endless}, return_when=asyncio.FIRST_COMPLETED)
        parts.signals.stop()
        await running
        for task in endless:
            if task.done():
                await task
    finally:
        stopping.cancel()
        retrying.cancel()
        await asyncio.gather(stopping, retrying, return_exceptions=True)


def _run(runtime: Runtime) -> None:
    if runtime.ray_address is not None:  # on the main thread, and before `run` sets signal handlers: Ray sets its own
        connect(runtime.ray_address, namespace="skyrl-engine", patience_s=runtime.ray_patience_s)
    asyncio.run(run(runtime))


def main() -> None:
    runtime = Runtime.from_environment()
    set_up_process(runtime.config.log_level, runtime.config.log_format, runtime.config.role.process("engine"))
    try:
        run_process("the engine", lambda: _run(runtime), outage)
    except Displaced:
        logger.error(
            "the engine has ended: server %s does not hold the claim to this database any more, because another server "
            "trains on it. This engine has written nothing since",
            runtime.server_id,
        )
        sys.exit(1)


if __name__ == "__main__":
    main()
