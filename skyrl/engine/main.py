"""The engine process: loads the backend beside the start of vLLM, publishes what is ready, runs the loop, cleans up."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
from dataclasses import replace

from sqlalchemy.exc import SQLAlchemyError

from skyrl.backends.base import Backend, ModelLimits, SamplingMode
from skyrl.backends.registry import create_backend
from skyrl.config.server import ConfigError, ServerConfig
from skyrl.db.checkpoints import store_key_of
from skyrl.db.database import Database
from skyrl.db.fence import Displaced, Fence, FencedDatabase
from skyrl.db.periodic import Rounds, repeat
from skyrl.engine.adoption import adopt_adapters
from skyrl.engine.crash_ledger import CrashLedger
from skyrl.engine.loop import Engine
from skyrl.engine.recovery import Recovery
from skyrl.engine.sampling import ColocatedSampler
from skyrl.engine.snapshots import Snapshots
from skyrl.engine.state import EngineStatePublisher
from skyrl.inference.adapter_host import AdapterHost, SharedDirectory
from skyrl.inference.engine_group import EngineGroup
from skyrl.inference.vllm_command import context_length, cuda_devices
from skyrl.launcher.runtime import Runtime, run_process, set_up_process
from skyrl.notify.doorbell import Doorbell, DoorbellListener
from skyrl.processes.startup import NotLoaded
from skyrl.sampling.client import ForwardingClient
from skyrl.sampling.endpoint import FixedEndpoint
from skyrl.sampling.http import HttpTransport
from skyrl.storage.registry import open_store
from skyrl.types.weights import AdapterVersion

logger = logging.getLogger(__name__)

BEAT_S = 3.0
RETRY_S = 10.0
"""How often models are tried again that could not be restored: the checkpoint store was away, or memory was short."""


class Heartbeat:
    """Says "alive" from a thread of its own, so that a long step does not look like a dead engine."""

    def __init__(self, state: EngineStatePublisher) -> None:
        self._state = state
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        rounds = Rounds("the engine's heartbeat", BEAT_S)
        while not self._stop.wait(BEAT_S):
            try:
                self._state.beat()
            except SQLAlchemyError as error:
                rounds.failed(error)
            else:
                rounds.went_well()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


def _adapter_host(config: ServerConfig, database: Database) -> SharedDirectory:
    """vLLM reads this server's state directory."""

    async def store_key(adapter: AdapterVersion) -> str | None:
        return await database.read_async(lambda c: store_key_of(c, adapter))

    return SharedDirectory(lambda: config.state_dir, open_store(config), store_key)


def _colocated(
    runtime: Runtime, database: Database, backend: Backend, group: EngineGroup | None, host: AdapterHost
) -> ColocatedSampler | None:
    if backend.sampling_mode is not SamplingMode.COLOCATED:
        return None
    assert group is not None
    assert runtime.inference_url is not None
    import torch

    client = ForwardingClient(
        HttpTransport(),
        FixedEndpoint(runtime.inference_url),
        host,
        api_key=runtime.inference_api_key,
        deadline_s=runtime.config.forwarding_deadline_s,
        zero_fill_logprobs=runtime.config.forwarding_zero_fill_logprobs,
    )
    base_name = runtime.config.served_names[0]
    # On a CPU vLLM's sleep gives no memory back; it would only cost two calls around every batch.
    return ColocatedSampler(
        database,
        client,
        group,
        backend.limits,
        base_name,
        sleeps=torch.cuda.is_available(),
        patience_s=runtime.config.forwarding_deadline_s,
    )


def _sampling_limits(config: ServerConfig, limits: ModelLimits) -> ModelLimits:
    """The trainer's limits, with the sampler's context if that is shorter."""
    served = context_length(config, cuda=bool(cuda_devices()))
    return limits if served is None else replace(limits, max_context=min(served, limits.max_context))


def _load(config: ServerConfig) -> Backend:
    """The backend with its base model. Raises ConfigError when it can never be loaded, NotLoaded for another cause:
    memory that is used by others, a file system or a model hub that is away."""
    try:
        return create_backend(config.backend, config)
    except ConfigError as error:
        if isinstance(error.__cause__, OSError):  # of reading the files, or of getting them from the hub
            raise NotLoaded(str(error)) from error
        raise
    except Exception as error:
        logger.exception("loading the base model failed")
        said = f"{type(error).__name__}: {error}"
        raise NotLoaded(f"base_model: cannot load {config.base_model_path}: {said}") from error


async def run(runtime: Runtime) -> None:
    """Until SIGTERM or SIGINT; both are heard at any time, also while the database is away.

    Raises Displaced when another server trains on the database by now, and what the database raises when the engine is
    to end while it cannot be used.
    """
    config, loop = runtime.config, asyncio.get_running_loop()
    stop = asyncio.Event()
    ledger = CrashLedger(config.running_file)
    fence = Fence(runtime.server_id, lambda: loop.call_soon_threadsafe(end_soon))
    database = FencedDatabase(config.database, fence)

    loading = False

    def end_soon() -> None:
        ledger.disregard()  # a long command may outlast the launcher's patience
        database.stop_retrying()
        if loading:  # on a thread that cannot be interrupted, perhaps for minutes; nothing else runs yet
            logger.info("told to stop while the base model was being loaded")
            os._exit(0)
        stop.set()

    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, end_soon)
    notices = Database(config.database)
    api = Doorbell(*runtime.api_doorbells)
    state = EngineStatePublisher(notices, api, fence)
    host = _adapter_host(config, notices)
    group = watching = heartbeat = None
    backend: Backend | None = None
    try:
        await asyncio.to_thread(database.confirm_claim)
        await asyncio.to_thread(state.training, ready=False, reason="loading the base model")
        if runtime.inference_url is not None:
            group = EngineGroup([runtime.inference_url], runtime.inference_api_key or "", state.publish_url, host)
            watching = asyncio.create_task(group.run())
        heartbeat = Heartbeat(state)
        if stop.is_set():  # by a signal: nothing is loaded for that. A lost claim has raised above, or does here
            await asyncio.to_thread(database.confirm_claim)
            return
        loading = True
        backend = await asyncio.to_thread(_load, config)
        loading = False
        sampler = _colocated(runtime, database, backend, group, host)
        snapshots = Snapshots(config, database, backend)
        store = open_store(config)
        await asyncio.to_thread(adopt_adapters, config, database, store)
        engine = Engine(config, database, backend, group, api, sampler, snapshots, store, ledger)
        listener = DoorbellListener(runtime.engine_doorbell, engine.ring)
        listener.start()
        recovery = Recovery(engine, database, backend, snapshots, store, ledger, stop.is_set)
        try:
            await asyncio.to_thread(state.training, ready=False, reason="restoring the models in training")
            await recovery.run()
            if not stop.is_set():
                limits = _sampling_limits(config, backend.limits)
                await asyncio.to_thread(state.training, ready=True, reason="", limits=limits)
            await _run_until(stop, engine, recovery, watching)
        finally:
            listener.close()
            if sampler is not None:
                await sampler.close()
    finally:
        if heartbeat is not None:
            await asyncio.to_thread(heartbeat.stop)
        if group is not None and watching is not None:
            await group.close()
            await asyncio.gather(watching, return_exceptions=True)
        if backend is not None:
            backend.close()
        await asyncio.to_thread(state.clear, "the engine has stopped")
        api.close()
        ledger.close()
        notices.close()
        database.close()
    if fence.lost:
        raise Displaced("the claim to the database was lost while nothing ran")


async def _run_until(
    stop: asyncio.Event, engine: Engine, recovery: Recovery, watching: asyncio.Task[None] | None
) -> None:
    """The loop, and beside it new tries to restore what could not be; ends by itself, or after the running turn.

    Raises what the loop raises, and what ended `watching` (the inference servers) or the tries to restore, which both
    end only by an error: a device that broke while a model was restored, for one.
    """
    if stop.is_set():
        engine.stop()  # recovery may not have come to its end: nothing is to run
    running = asyncio.create_task(engine.run())
    stopping = asyncio.create_task(stop.wait())
    retrying = asyncio.create_task(repeat("restoring models", RETRY_S, recovery.retry))
    try:
        endless = [retrying] if watching is None else [retrying, watching]
        await asyncio.wait({running, stopping, *endless}, return_when=asyncio.FIRST_COMPLETED)
        engine.stop()
        await running
        for task in endless:
            if task.done():
                await task
    finally:
        stopping.cancel()
        retrying.cancel()
        await asyncio.gather(stopping, retrying, return_exceptions=True)


def main() -> None:
    runtime = Runtime.from_environment()
    set_up_process(runtime.config)
    try:
        run_process("the engine", lambda: asyncio.run(run(runtime)))
    except Displaced:
        logger.error(
            "the engine has ended: server %s does not hold the claim to this database any more, so another server "
            "trains on it. Nothing was written since",
            runtime.server_id,
        )
        sys.exit(1)


if __name__ == "__main__":
    main()
