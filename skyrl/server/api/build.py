"""Builds the parts of an API process. `build` reads nothing, opens nothing and starts no thread; `begin` in
`background.py` does."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self

from skyrl import __version__
from skyrl.base.config.server import ServerConfig
from skyrl.base.config.sight import sight_of
from skyrl.inference.adapter_host import AdapterHost, HostOfOtherServer, SharedDirectory, StoredAdapters
from skyrl.inference.features import InferenceFeatures
from skyrl.runtime.metrics.files import MetricsDirectory
from skyrl.runtime.metrics.processes import ApiMetrics
from skyrl.runtime.metrics.readiness import ReadinessMetrics
from skyrl.runtime.processes.runtime import Runtime
from skyrl.runtime.tracing.opening import open_spans
from skyrl.server.api.access import Access
from skyrl.server.api.notices import NoticeHandler
from skyrl.server.api.readiness import EngineWatch
from skyrl.server.api.ready_reasons import ReadyReasons
from skyrl.server.api.served import Served
from skyrl.server.api.services import Services
from skyrl.server.api.session_life import SessionLife
from skyrl.server.api.signing import SignedUrls
from skyrl.server.api.tokens import Tokens
from skyrl.server.futures.store import FutureStore
from skyrl.server.futures.trace import Traces
from skyrl.server.openai.chat_pictures import ChatPictures
from skyrl.server.openai.in_flight import InFlight
from skyrl.server.openai.models import ModelNames
from skyrl.server.openai.service import OpenAIService, Passage
from skyrl.server.pictures.checking import PictureChecks
from skyrl.server.pictures.files import StoredPictureFiles
from skyrl.server.pictures.ingress import PictureIngress
from skyrl.server.quotas.limits import Bounds, QuotaLimits
from skyrl.server.quotas.tenants import Quotas
from skyrl.server.request_status.finding import StatusFinder
from skyrl.server.sampling.admission import Admission
from skyrl.server.sampling.client import ForwardingClient
from skyrl.server.sampling.endpoint import EngineEndpoint, FixedEndpoint
from skyrl.server.sampling.fair_order import FairOrder
from skyrl.server.sampling.guards import FeatureGuard
from skyrl.server.sampling.http import HttpTransport
from skyrl.server.sampling.loaded_weights import LoadedWeights
from skyrl.server.sampling.ownership import SampleOwnership
from skyrl.server.sampling.service import SampleService
from skyrl.storage.checkpoint_store.base import CheckpointStore
from skyrl.storage.checkpoint_store.registry import open_store
from skyrl.storage.db.adapter_uses import AdapterUses
from skyrl.storage.db.api_processes import ApiProcesses
from skyrl.storage.db.audit import Audit
from skyrl.storage.db.checkpoints import Checkpoints
from skyrl.storage.db.copies import Copies
from skyrl.storage.db.database import Database
from skyrl.storage.db.engine_state import EngineState, read_state
from skyrl.storage.db.inference_servers import PlacedServer, read_servers
from skyrl.storage.db.keys import Keys
from skyrl.storage.db.models import Models
from skyrl.storage.db.picture_files import PictureFiles
from skyrl.storage.db.retention import Retention
from skyrl.storage.db.run_steps import Curves
from skyrl.storage.db.sample_clocks import SampleClocks
from skyrl.storage.db.samplers import Samplers
from skyrl.storage.db.session_search import SessionSearch
from skyrl.storage.db.sessions import Sessions
from skyrl.storage.db.urls import postgres_conninfo
from skyrl.storage.db.usage import Usage, UsageCounter
from skyrl.storage.db.writer import GroupCommitWriter
from skyrl.storage.notify.notifier import Notifier


@dataclass(frozen=True)
class Secrets:
    """Signs tokens and links, with secrets that only this server has."""

    tokens: Tokens
    urls: SignedUrls

    @classmethod
    def open(cls, runtime: Runtime) -> Self:
        """Reads the secrets from the state directory, and makes them at first use."""
        config = runtime.config
        return cls(Tokens.open(config.state_dir), SignedUrls.open(config.state_dir, config.public_url))


@dataclass(frozen=True)
class Base:
    """The parts that the services share."""

    runtime: Runtime
    metrics: ApiMetrics
    database: Database
    writer: GroupCommitWriter
    notifier: Notifier
    futures: FutureStore
    keys: Keys
    counter: UsageCounter
    watch: EngineWatch

    @classmethod
    def of(cls, runtime: Runtime) -> Self:
        metrics = ApiMetrics.new()
        database = Database(runtime.config.database)
        writer = GroupCommitWriter(database, metrics.commits)
        notifier = Notifier(
            runtime.process_id,
            own_doorbell=runtime.api_doorbell,
            engine_doorbells=runtime.engine_doorbells,
            postgres_conninfo=None if database.is_sqlite else postgres_conninfo(database.url),
        )
        return cls(
            runtime=runtime,
            metrics=metrics,
            database=database,
            writer=writer,
            notifier=notifier,
            futures=FutureStore(database, writer, runtime.process_id, notifier.peers),
            keys=Keys(database, writer),
            counter=UsageCounter(writer),
            watch=EngineWatch(
                partial(_engine_state, database, runtime.config), runtime.config.modes, _servers(runtime, database)
            ),
        )


@dataclass(frozen=True)
class ApiProcess:
    """All parts of an API process. The routes use `services`; background work and shutdown use the others."""

    base: Base
    services: Services
    notices: NoticeHandler
    ownership: SampleOwnership
    clocks: SampleClocks
    retention: Retention


def build(runtime: Runtime, secrets: Secrets, features: InferenceFeatures) -> ApiProcess:
    """`features` are those of the inference server."""
    base = Base.of(runtime)
    database, writer = base.database, base.writer
    services = _services(base, secrets, features)
    _show_readiness(base)
    ownership = SampleOwnership(
        ApiProcesses(database, writer, runtime.process_id),
        base.notifier.peers,
        base.futures,
        services.sampling,
        forwards=services.client is not None,
    )
    return ApiProcess(
        base=base,
        services=services,
        notices=NoticeHandler(base.futures, services.sampling, base.watch, services.session_life.changed),
        ownership=ownership,
        clocks=SampleClocks(writer, runtime.process_id),
        retention=Retention(database, writer, runtime.config.result_retention_s),
    )


def _services(base: Base, secrets: Secrets, features: InferenceFeatures) -> Services:
    config, database, writer = base.runtime.config, base.database, base.writer
    sessions, samplers = Sessions(database, writer, base.notifier.peers), Samplers(database, writer)
    models, checkpoints = Models(database, writer), Checkpoints(database, writer)
    store = open_store(config, base.metrics.traffic)
    adapters = _adapters(base, store, checkpoints)
    quotas = Quotas(database, QuotaLimits.of(config), Bounds.of(config), base.futures.is_pending)
    transport = HttpTransport(config.forwarding_inference_max_connections)
    loaded = LoadedWeights(database) if config.full_finetuning else None
    files, checks = PictureFiles(database), PictureChecks(base.metrics.images)
    sight = sight_of(config)
    most_bytes = config.max_stored_image_bytes
    pictures = PictureIngress(database, checks, files, sight, most_bytes, base.metrics.images)
    client = _client(base, adapters, transport, loaded, files)
    passage = Passage(
        admission=Admission(config.max_pending_samples, config.max_pending_sample_bytes, base.metrics.samples),
        order=FairOrder() if config.modes.own_inference or config.external_inference_priority else None,
        guard=FeatureGuard(features),
        quotas=quotas,
        usage=base.counter,
        metrics=base.metrics.samples,
    )
    sampling = _sampling(base, samplers, sessions, client, passage, pictures, loaded)
    uses = AdapterUses(writer)
    return Services(
        config=config,
        process_id=base.runtime.process_id,
        database=database,
        served=Served(config),
        sessions=sessions,
        session_life=SessionLife(
            sessions,
            samplers,
            models,
            base.futures,
            sampling,
            base.notifier.engine,
            trains=config.modes.trains,
            timeout_s=config.session_timeout_s,
        ),
        models=models,
        samplers=samplers,
        checkpoints=checkpoints,
        checkpoint_store=store,
        adapters=adapters,
        copies=Copies(database, writer),
        futures=base.futures,
        sampling=sampling,
        pictures=pictures,
        loaded=loaded,
        client=client,
        engine=base.notifier.engine,
        watch=base.watch,
        readiness=ReadyReasons(config, base.watch, client),
        tokens=secrets.tokens,
        access=Access(base.keys, secrets.tokens, managed=config.api_keys == "managed"),
        urls=secrets.urls,
        search=SessionSearch(database),
        audit=Audit(database, writer),
        usage=Usage(database),
        traces=Traces(database),
        quotas=quotas,
        statuses=StatusFinder(
            database,
            sampling,
            quotas,
            activity=lambda: base.watch.activity,
            trouble=base.watch.training_trouble,
            places=_adapter_places(config),
            session_timeout_s=config.session_timeout_s,
            away=base.watch.why_away,
        ),
        curves=Curves(),
        metrics=base.metrics,
        published_metrics=MetricsDirectory(base.runtime.metrics_directory),
        openai=(
            None if client is None else OpenAIService(client, transport, passage, uses, ChatPictures(checks, sight))
        ),
        openai_models=ModelNames(config, checkpoints, base.watch.limits, loaded),
        openai_in_flight=InFlight(),
        adapter_uses=uses,
        spans=open_spans(config.otlp_endpoint, f"api-{base.runtime.slot}"),
    )


def _adapters(base: Base, store: CheckpointStore, checkpoints: Checkpoints) -> AdapterHost:
    config, watch = base.runtime.config, base.watch
    stored = StoredAdapters(store, checkpoints.store_key_of)
    if config.weights_travel:
        return stored
    shared = SharedDirectory(partial(watch.adapters_in, config.state_dir), store, checkpoints.store_key_of)
    if not config.modes.shares_inference:
        return shared

    async def host() -> AdapterHost:
        return stored if (await watch.refresh()).state_dir is None else shared

    return HostOfOtherServer(host)


def _adapter_places(config: ServerConfig) -> int | None:
    """How many adapters the inference servers run at a time; None for servers that skyrl does not run, or that run no
    adapters."""
    backend = config.backend_config
    if config.full_finetuning or not config.modes.manages_inference:
        return None
    return backend.lora.max_loras * backend.inference.num_engines


def _show_readiness(base: Base) -> None:
    config, watch = base.runtime.config, base.watch
    name = config.served_names[0]
    name = Path(name).name if name.startswith(("/", "~", ".")) else name  # paths stay on the server
    build = {"version": __version__, "backend": config.backend, "base_model": name}

    def heartbeat_at() -> float | None:
        return watch.state.heartbeat_at if config.modes.trains else None

    ReadinessMetrics(base.metrics.registry, build, watch.ready_parts, heartbeat_at)


def _sampling(
    base: Base,
    samplers: Samplers,
    sessions: Sessions,
    client: ForwardingClient | None,
    passage: Passage,
    pictures: PictureIngress,
    loaded: LoadedWeights | None,
) -> SampleService:
    return SampleService(
        base.futures,
        samplers,
        sessions,
        client=client,
        engine=base.notifier.engine,
        limits=base.watch.limits,
        admission=passage.admission,
        order=passage.order,
        base_name=base.runtime.config.served_names[0],
        guard=passage.guard,
        usage=passage.usage,
        quotas=passage.quotas,
        pictures=pictures,
        metrics=base.metrics.samples,
        loaded=loaded,
    )


def _client(
    base: Base, adapters: AdapterHost, transport: HttpTransport, loaded: LoadedWeights | None, files: PictureFiles
) -> ForwardingClient | None:
    """None if the engine runs the samples."""
    runtime, config = base.runtime, base.runtime.config
    if not config.modes.forwards:
        return None
    external = config.external_inference_url
    return ForwardingClient(
        transport,
        EngineEndpoint(partial(_engine_state, base.database, config)) if external is None else FixedEndpoint(external),
        adapters,
        api_key=runtime.inference_api_key,
        deadline_s=config.forwarding_deadline_s,
        zero_fill_logprobs=config.forwarding_zero_fill_logprobs,
        replicas=_replicas(base),
        loaded=loaded,
        shares_keys=config.routed or config.modes.shares_inference,
        metrics=base.metrics.adapters,
        pictures=StoredPictureFiles(files),
    )


def _replicas(base: Base) -> Collection[str]:
    """The URLs of the servers behind this server's router; none if it has no router. Those on a Ray cluster change."""
    config = base.runtime.config
    if not config.routed:
        return ()
    return frozenset(base.runtime.replica_urls) if config.ray is None else base.watch.server_urls


def _servers(runtime: Runtime, database: Database) -> Callable[[], Awaitable[list[PlacedServer]]] | None:
    if runtime.config.ray is None or not runtime.config.modes.manages_inference:
        return None

    async def read() -> list[PlacedServer]:
        return await database.read_async(lambda c: read_servers(c, runtime.server_id))

    return read


async def _engine_state(database: Database, config: ServerConfig) -> EngineState:
    return await database.read_async(lambda c: read_state(c, config.role.state_keys))
