"""Builds the parts of an API process. `build` reads nothing, opens nothing and starts no thread; `begin` in
`server.py` does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from skyrl import __version__
from skyrl.api.access import Access, Tokens
from skyrl.api.build_model import Shared, build_model
from skyrl.api.metrics import ApiMetrics, ReadinessMetrics
from skyrl.api.notices import NoticeHandler
from skyrl.api.request_status.finding import StatusFinder
from skyrl.api.served import EngineWatch, Served, ServedModel, ServerReadiness, Tokenizers
from skyrl.api.services import Services
from skyrl.api.session_life import FullPlace, SessionLife
from skyrl.api.signed_links import SignedUrls
from skyrl.api.timeline import Traces
from skyrl.base.config.base_models import is_path
from skyrl.base.config.server import ServerConfig
from skyrl.base.config.several import ByName
from skyrl.chat.agents.live_sessions import LiveSessions
from skyrl.chat.agents.planning import Planner, SamplingModel
from skyrl.chat.agents.rendering.loaded_models import ModelContinuations
from skyrl.chat.agents.turns import TurnRunner
from skyrl.chat.openai.models import Base as OpenAIBase
from skyrl.chat.openai.models import ModelNames
from skyrl.chat.openai.service import InFlight
from skyrl.inference.features import InferenceFeatures
from skyrl.runtime.metrics.files import MetricsDirectory
from skyrl.runtime.processes.runtime import Runtime
from skyrl.runtime.tracing import open_spans
from skyrl.sampling.base_model import BaseModels
from skyrl.sampling.gate import Admission
from skyrl.sampling.pictures import PictureChecks
from skyrl.sampling.quota_account import Bounds, QuotaLimits
from skyrl.sampling.quotas import Quotas
from skyrl.sampling.service import SampleOwnership, SampleService
from skyrl.storage.checkpoint_store.registry import open_store
from skyrl.storage.db.adapter_versions import AdapterUses
from skyrl.storage.db.agents import AgentSessions, AgentTurns
from skyrl.storage.db.audit import Audit
from skyrl.storage.db.checkpoints import Checkpoints, Copies
from skyrl.storage.db.database import Database, postgres_conninfo
from skyrl.storage.db.models import Models
from skyrl.storage.db.pictures import PictureFiles
from skyrl.storage.db.processes import ApiProcesses, SampleClocks
from skyrl.storage.db.retention import Retention
from skyrl.storage.db.row_caches import Keys
from skyrl.storage.db.run_steps import Curves
from skyrl.storage.db.samplers import Samplers
from skyrl.storage.db.session_search import SessionSearch
from skyrl.storage.db.sessions import Sessions
from skyrl.storage.db.usage import Usage, UsageCounter
from skyrl.storage.db.writer import GroupCommitWriter
from skyrl.storage.futures.store import FutureStore
from skyrl.storage.notices import Notifier


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
    recorder: GroupCommitWriter
    """Records forwarded samples. On PostgreSQL it waits for no other process; on SQLite it is `writer`."""
    notifier: Notifier
    futures: FutureStore
    keys: Keys
    counter: UsageCounter

    @classmethod
    def of(cls, runtime: Runtime) -> Self:
        metrics = ApiMetrics.new([one.config.role.labels for one in runtime.each])
        database = Database(runtime.config.database)
        writer = GroupCommitWriter(database, metrics.commits)
        recorder = writer if database.is_sqlite else GroupCommitWriter(database, metrics.commits, ordered=False)
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
            recorder=recorder,
            notifier=notifier,
            futures=FutureStore(database, writer, runtime.process_id, notifier.peers, recorder),
            keys=Keys(database, writer),
            counter=UsageCounter(writer),
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


def build(runtime: Runtime, secrets: Secrets, features: Sequence[InferenceFeatures]) -> ApiProcess:
    """`features` are those of each base model's inference server."""
    base = Base.of(runtime)
    database, writer = base.database, base.writer
    services = _services(base, secrets, features)
    _show_readiness(base, services.served)
    ownership = SampleOwnership(
        ApiProcesses(database, writer, runtime.process_id),
        base.notifier.peers,
        base.futures,
        services.sampling,
        forwards=all(model.sampling.client is not None for model in services.served),
    )
    return ApiProcess(
        base=base,
        services=services,
        notices=NoticeHandler(
            base.futures,
            services.sampling,
            services.refresh,
            services.session_life.changed,
            services.agents.live.look_again,
        ),
        ownership=ownership,
        clocks=SampleClocks(writer, runtime.process_id),
        retention=Retention(database, writer, runtime.config.result_retention_s, runtime.config.agents.retention_s),
    )


def _services(base: Base, secrets: Secrets, features: Sequence[InferenceFeatures]) -> Services:
    runtime, config, database, writer = base.runtime, base.runtime.config, base.database, base.writer
    names = ByName.of(tuple(one.config for one in runtime.each))
    sessions, samplers = Sessions(database, writer, base.notifier.peers), Samplers(database, writer, names.own)
    models, checkpoints = Models(database, writer), Checkpoints(database, writer)
    store = open_store(config, base.metrics.traffic.count)
    quotas = Quotas(database, QuotaLimits.of(config), Bounds.of(config), base.futures.is_pending)
    checks, uses = PictureChecks(base.metrics.images), AdapterUses(writer)
    admission = Admission(config.max_pending_samples, config.max_pending_sample_bytes, base.metrics.refusals)
    shared = Shared(
        database=database,
        metrics=base.metrics,
        futures=base.futures,
        samplers=samplers,
        checkpoints=checkpoints,
        store=store,
        admission=admission,
        quotas=quotas,
        usage=base.counter,
        uses=uses,
        files=PictureFiles(database),
        checks=checks,
    )
    parts = zip(runtime.each, features, base.metrics.models, strict=True)
    built = [build_model(one, its, counted, shared) for one, its, counted in parts]
    served = Served(built, names)
    sampled = BaseModels([model.sampling for model in built], names)
    sampling = SampleService(
        base.futures,
        samplers,
        sessions,
        sampled,
        engine=base.notifier.engine,
        quotas=quotas,
        metrics=base.metrics.refusals,
    )
    openai_models = ModelNames([_base_of(model) for model in built], checkpoints)
    agent_sessions, agent_turns = AgentSessions(database, writer), AgentTurns(database, writer)
    continuations = ModelContinuations([model.config.tokenizer_id or model.config.base_model_path for model in built])
    session_life = SessionLife(
        sessions,
        samplers,
        models,
        base.futures,
        sampling,
        base.notifier.engine,
        trains=any(model.config.modes.trains for model in built),
        timeout_s=config.session_timeout_s,
    )
    return Services(
        config=config,
        process_id=runtime.process_id,
        database=database,
        served=served,
        sessions=sessions,
        session_life=session_life,
        full_place=FullPlace(database, sessions, session_life),
        models=models,
        samplers=samplers,
        checkpoints=checkpoints,
        checkpoint_store=store,
        copies=Copies(database, writer),
        futures=base.futures,
        sampling=sampling,
        picture_checks=checks,
        engine=base.notifier.engine,
        readiness=ServerReadiness(config.state_dir, {model.config.served_names[0]: model.readiness for model in built}),
        tokenizers=Tokenizers(served, sessions),
        tokens=secrets.tokens,
        access=Access(base.keys, secrets.tokens, secrets.tokens.agent_keys, managed=config.api_keys == "managed"),
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
            engine_of=lambda base_model: served.of(base_model).watch,
            session_timeout_s=config.session_timeout_s,
        ),
        curves=Curves(),
        metrics=base.metrics,
        published_metrics=MetricsDirectory(runtime.metrics_directory),
        openai_models=openai_models,
        openai_in_flight=InFlight(),
        agents=TurnRunner(
            LiveSessions(
                agent_sessions,
                agent_turns,
                base.metrics.agents,
                base.notifier.peers,
                alone=database.is_sqlite,
                most_bytes=config.agents.bytes,
            ),
            agent_turns,
            _planner(built, openai_models, continuations, config),
            base.metrics.agents,
        ),
        agent_sessions=agent_sessions,
        agent_turns=agent_turns,
        agent_continuations=continuations,
        adapter_uses=uses,
        spans=open_spans(config.otlp_endpoint, f"api-{runtime.slot}"),
    )


def _planner(
    built: Sequence[ServedModel], names: ModelNames, continuations: ModelContinuations, config: ServerConfig
) -> Planner:
    models = [SamplingModel(model.openai, model.watch.limits) for model in built if model.openai is not None]
    return Planner(models, names, continuations, grammars=config.openai_grammars)


def _base_of(model: ServedModel) -> OpenAIBase:
    config = model.config
    return OpenAIBase(
        config.served_names, (config.base_model_path,), model.watch.limits, model.sampling.current_weights
    )


def _show_readiness(base: Base, served: Served) -> None:
    """Each base model in its own registry, whose label then says which base model it is."""
    for model, metrics in zip(served, base.metrics.models, strict=True):
        config, watch = model.config, model.watch
        build = {"version": __version__, "backend": config.backend}
        if not metrics.labels:
            name = config.served_names[0]
            build["base_model"] = Path(name).name if is_path(name) else name  # paths stay on the server

        def heartbeat_at(config: ServerConfig = config, watch: EngineWatch = watch) -> float | None:
            return watch.state.heartbeat_at if config.modes.trains else None

        ReadinessMetrics(metrics.registry, build, watch.ready_parts, heartbeat_at)
