"""The objects that an API process consists of, built once. Holds no rules of its own.

Building reads nothing, opens nothing and starts no thread; `begin` in `server.py` does."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial
from pathlib import Path

from skyrl import __version__
from skyrl.api.access import Access, Tokens
from skyrl.api.metrics import ApiMetrics, ModelMetrics, ReadinessMetrics
from skyrl.api.notices import NoticeHandler
from skyrl.api.request_status.finding import StatusFinder
from skyrl.api.run_health.health import Healths
from skyrl.api.search_turns import SearchTurns
from skyrl.api.served import EngineWatch, ReadyReasons, Served, ServedModel, ServerReadiness, Tokenizers
from skyrl.api.session_life import FullPlace, SessionLife
from skyrl.api.signed_links import SignedUrls
from skyrl.api.timeline import Traces
from skyrl.base.config.base_models import is_path
from skyrl.base.config.server import ServerConfig, vision_of
from skyrl.base.config.several import ByName
from skyrl.base.model_files import model_config, template_of, whole_config
from skyrl.base.types.placed_server import PlacedServer
from skyrl.chat.agents.live_sessions import LiveSessions
from skyrl.chat.agents.planning import Planner, SamplingModel
from skyrl.chat.agents.rendering.loaded_models import ModelContinuations, has_system_role
from skyrl.chat.agents.turns import TurnRunner
from skyrl.chat.openai.messages import ChatPictures, difference, efforts_of
from skyrl.chat.openai.models import Base, ModelNames
from skyrl.chat.openai.service import InFlight, OpenAIService
from skyrl.http.client import HttpClient
from skyrl.inference.adapter_host import AdapterHost, HostOfOtherServer, SharedDirectory, StoredAdapters
from skyrl.inference.features import InferenceFeatures
from skyrl.runtime.metrics.files import MetricsDirectory
from skyrl.runtime.processes.runtime import Runtime
from skyrl.runtime.tracing import open_spans
from skyrl.sampling.adapter_probe import AdapterProbe
from skyrl.sampling.base_model import BaseModels, BaseModelSampling, ForwardedSamples
from skyrl.sampling.client import ForwardingClient
from skyrl.sampling.gate import Admission, FairOrder, SamplingGate
from skyrl.sampling.job import FeatureGuard
from skyrl.sampling.pictures import PictureChecks, PictureIngress
from skyrl.sampling.quota_account import Bounds, QuotaLimits
from skyrl.sampling.quotas import Quotas
from skyrl.sampling.servers import CurrentWeightsCheck, EngineEndpoint, FixedEndpoint
from skyrl.sampling.service import SampleOwnership, SampleService
from skyrl.sampling.slots import ByNumber, ByWork, Slots
from skyrl.storage.checkpoint_store.registry import open_store, saves_disk
from skyrl.storage.db.adapter_versions import AdapterUses
from skyrl.storage.db.agents import AgentSessions, AgentTurns
from skyrl.storage.db.audit import Audit
from skyrl.storage.db.checkpoint_search import CheckpointSearch
from skyrl.storage.db.checkpoints import Checkpoints, Copies
from skyrl.storage.db.database import Database, postgres_conninfo
from skyrl.storage.db.engine_state import EngineState, read_state
from skyrl.storage.db.models import Models
from skyrl.storage.db.pictures import PictureFiles
from skyrl.storage.db.processes import ApiProcesses, SampleClocks, read_servers
from skyrl.storage.db.retention import Retention
from skyrl.storage.db.row_caches import Keys
from skyrl.storage.db.run_steps import Curves
from skyrl.storage.db.samplers import Samplers
from skyrl.storage.db.session_search import SessionSearch
from skyrl.storage.db.sessions import Continuity, Sessions
from skyrl.storage.db.uploads import Uploads
from skyrl.storage.db.usage import Usage, UsageCounter
from skyrl.storage.db.writer import GroupCommitWriter
from skyrl.storage.futures.store import FutureStore
from skyrl.storage.notices import Notifier
from skyrl.storage.shares import DiskShares


class Services:
    """Routes, background work and shutdown use these objects. `tokens` and `urls` sign with secrets that only this
    server has; `features` are those of each base model's inference server."""

    def __init__(
        self, runtime: Runtime, tokens: Tokens, urls: SignedUrls, features: Sequence[InferenceFeatures]
    ) -> None:
        config, process_id = runtime.config, runtime.process_id
        self.config, self.process_id = config, process_id
        self.metrics = metrics = ApiMetrics.new([one.config.role.labels for one in runtime.each])
        self.published_metrics = MetricsDirectory(runtime.metrics_directory)
        """Where all processes of the server publish their metrics."""
        self.spans = open_spans(config.otlp_endpoint, f"api-{runtime.slot}")
        """None if nothing is traced."""
        self.database = database = Database(config.database)
        self.writer = writer = GroupCommitWriter(database, metrics.commits)
        self.recorder = writer if database.is_sqlite else GroupCommitWriter(database, metrics.commits, ordered=False)
        """Records forwarded samples. On PostgreSQL it waits for no other process; on SQLite it is `writer`."""
        self.notifier = Notifier(
            process_id,
            own_doorbell=runtime.api_doorbell,
            engine_doorbells=runtime.engine_doorbells,
            postgres_conninfo=None if database.is_sqlite else postgres_conninfo(database.url),
        )
        peers, self.engine = self.notifier.peers, self.notifier.engine
        agents = config.agents
        self.shares = DiskShares(
            None if database.file is None else database.file.parent,
            config.min_free_disk_bytes,
            config.result_retention_s,
            agents.seconds + agents.retention_s,
        )
        self.futures = FutureStore(database, writer, process_id, peers, self.recorder, self.shares)
        self.keys = Keys(database, writer)
        self.counter = UsageCounter(writer)
        names = ByName.of(tuple(one.config for one in runtime.each))
        continuity = Continuity()
        self.sessions = Sessions(database, writer, peers, continuity)
        self.samplers = Samplers(database, writer, names.own)
        self.models, self.checkpoints = Models(database, writer), Checkpoints(database, writer)
        self.checkpoint_store = open_store(config, metrics.traffic.count)
        self.copies, self.uploads = Copies(database, writer), Uploads(database, writer)
        self.quotas = Quotas(
            database, QuotaLimits.of(config), Bounds.of(config), self.futures.is_pending, saves_disk(config)
        )
        self.picture_files, self.picture_checks = PictureFiles(database), PictureChecks(metrics.images)
        self.adapter_uses = AdapterUses(writer)
        self.admission = Admission(config.max_pending_samples, config.max_pending_sample_bytes, metrics.refusals)

        built = [self._model(*each) for each in zip(runtime.each, features, metrics.models, strict=True)]
        self.served = Served(built, names)
        self.readiness = ServerReadiness(config.state_dir, {model.name: model.readiness for model in built})
        self.tokenizers = Tokenizers(self.served, self.sessions)
        self.sampling = SampleService(
            self.futures,
            self.samplers,
            self.sessions,
            BaseModels([model.sampling for model in built], names),
            engine=self.engine,
            quotas=self.quotas,
            metrics=metrics.refusals,
        )
        self.session_life = SessionLife(
            self.sessions,
            self.samplers,
            self.models,
            self.futures,
            self.sampling,
            self.engine,
            trains=any(model.config.modes.trains for model in built),
            timeout_s=config.session_timeout_s,
        )
        self.full_place = FullPlace(database, self.sessions, self.session_life)
        self.statuses = StatusFinder(
            database,
            self.sampling,
            self.quotas,
            engine_of=lambda base_model: self.served.of(base_model).watch,
            session_timeout_s=config.session_timeout_s,
        )
        self.tokens, self.urls = tokens, urls
        self.access = Access(self.keys, tokens, managed=config.api_keys == "managed")
        self.search, self.checkpoint_search = SessionSearch(database), CheckpointSearch(database)
        self.search_turns = SearchTurns()
        self.audit = Audit(database, writer)
        self.usage, self.traces = Usage(database), Traces(database)
        self.curves, self.healths = Curves(), Healths()

        self.openai_models = ModelNames([_base_of(model) for model in built], self.checkpoints)
        self.openai_in_flight = InFlight()
        self.agent_sessions, self.agent_turns = AgentSessions(database, writer), AgentTurns(database, writer)
        self.agent_continuations = ModelContinuations(
            [model.config.tokenizer_id or model.config.base_model_path for model in built]
        )
        live = LiveSessions(
            self.agent_sessions,
            self.agent_turns,
            metrics.agents,
            peers,
            alone=database.is_sqlite,
            most_bytes=agents.bytes,
            continuity=continuity,
        )
        sampled = [SamplingModel(model.openai, model.watch.limits) for model in built if model.openai is not None]
        planner = Planner(sampled, self.openai_models, self.agent_continuations, grammars=config.openai_grammars)
        self.agents = TurnRunner(live, self.agent_turns, planner, metrics.agents, self.shares)

        self.ownership = SampleOwnership(
            ApiProcesses(database, writer, process_id),
            peers,
            self.futures,
            self.sampling,
        )
        self.notices = NoticeHandler(
            self.futures, self.sampling, self.refresh, self.session_life.changed, live.look_again
        )
        self.clocks = SampleClocks(writer, process_id)
        self.retention = Retention(database, writer, config.result_retention_s, agents.retention_s, continuity)

    async def refresh(self) -> None:
        """Read the engines' states."""
        for model in self.served:
            await model.watch.refresh()

    def _model(self, runtime: Runtime, features: InferenceFeatures, metrics: ModelMetrics) -> ServedModel:
        """What this process has for one base model: how it is sampled from, and what is known of its engine."""
        config, database = runtime.config, self.database
        state = partial(_engine_state, database, config)
        context = model_config(config.base_model_path).get("max_position_embeddings")
        watch = EngineWatch(state, config.modes, _servers(runtime, database), config.role.state_keys[0], context)
        adapters = self._adapters(config, watch)
        current_weights = CurrentWeightsCheck(database, config.role.own) if config.full_finetuning else None
        transport = HttpClient()
        external = config.external_inference_url
        client = None
        if config.modes.forwards:
            client = ForwardingClient(
                transport,
                EngineEndpoint(state) if external is None else FixedEndpoint(external),
                adapters,
                api_key=runtime.inference_api_key,
                deadline_s=config.forwarding_deadline_s,
                zero_fill_logprobs=config.forwarding_zero_fill_logprobs,
                replicas=_replicas(runtime, watch),
                current_weights=current_weights,
                shares_keys=config.routed or config.modes.shares_inference,
                metrics=metrics.adapters,
                pictures=self.picture_files,
                probe=_probe(config, transport, runtime.inference_api_key),
            )
        sight, guard = vision_of(config), FeatureGuard(features)
        gate = SamplingGate(
            self.counter.count,
            metrics.samples,
            runs=self.counter.runs,
            order=FairOrder() if config.modes.own_inference or config.external_inference_priority else None,
            slots=_slots(config, client),
            admission=self.admission,
            quotas=self.quotas,
            refusals=self.metrics.refusals,
        )
        sampling = BaseModelSampling(
            base_name=config.served_names[0],
            limits=watch.limits,
            client=client,
            gate=gate,
            guard=guard,
            pictures=PictureIngress(
                database,
                self.picture_checks,
                self.picture_files,
                sight,
                config.max_stored_image_bytes,
                self.metrics.images,
            ),
            forwarded=ForwardedSamples(client, self.futures, self.samplers, gate),
            current_weights=current_weights,
            places=_adapter_places(config),
            why_away=watch.why_away,
        )
        openai, template = None, template_of(config.base_model_path)
        templates = (template, template_of(config.base_model_path, tools=False))
        if client is not None:
            openai = OpenAIService(
                client,
                transport,
                gate,
                guard,
                self.adapter_uses,
                ChatPictures(self.picture_checks, sight),
                has_system_role=has_system_role(config.base_model_path),
                takes_documents=any(text is None or "documents" in text for text in templates),
                efforts=efforts_of(template),
                renderer_note=difference(whole_config(config.base_model_path).get("model_type", ""), template),
            )
        _show_readiness(config, watch, metrics)
        return ServedModel(runtime, sampling, watch, ReadyReasons(config, watch, client), adapters, openai)

    def _adapters(self, config: ServerConfig, watch: EngineWatch) -> AdapterHost:
        store, store_key_of = self.checkpoint_store, self.checkpoints.store_key_of
        stored = StoredAdapters(store, store_key_of)
        if config.weights_travel:
            return stored
        directory = SharedDirectory(partial(watch.adapters_in, config.state_dir), store, store_key_of)
        if not config.modes.shares_inference:
            return directory

        async def host() -> AdapterHost:
            return stored if (await watch.refresh()).state_dir is None else directory

        return HostOfOtherServer(host)


def _base_of(model: ServedModel) -> Base:
    config, current_weights = model.config, model.sampling.current_weights
    return Base(config.served_names, (config.base_model_path,), model.watch.limits, current_weights)


def _show_readiness(config: ServerConfig, watch: EngineWatch, metrics: ModelMetrics) -> None:
    """Each base model in its own registry, whose label then says which base model it is."""
    build = {"version": __version__, "backend": config.backend}
    if not metrics.labels:
        name = config.served_names[0]
        build["base_model"] = Path(name).name if is_path(name) else name  # paths stay on the server

    def heartbeat_at() -> float | None:
        return watch.state.heartbeat_at if config.modes.trains else None

    ReadinessMetrics(metrics.registry, build, watch.ready_parts, heartbeat_at)


def _adapter_places(config: ServerConfig) -> int | None:
    """How many adapters the inference servers run at a time; None for servers that skyrl does not run, or that run no
    adapters."""
    backend = config.backend_config
    if config.full_finetuning or not config.modes.manages_inference:
        return None
    return backend.lora.slots * backend.inference.num_engines


def _slots(config: ServerConfig, client: ForwardingClient | None) -> Slots | None:
    """None for inference servers that skyrl does not run, unless the operator has set a bound."""
    if (most := config.forwarding_inference_max_connections) is not None:
        return Slots(ByNumber(most), config.forwarding_deadline_s)
    if client is None or not config.modes.manages_inference:
        return None
    inference, places = config.backend_config.inference, _adapter_places(config)
    parts_of = ByWork(inference.max_num_seqs, inference.num_engines)
    crowd = None if places is None else lambda: client.running.adapters / places
    return Slots(parts_of, config.forwarding_deadline_s, crowd)


def _probe(config: ServerConfig, transport: HttpClient, api_key: str | None) -> AdapterProbe | None:
    """For an inference server that skyrl does not run, and that may ignore adapters without a word."""
    if config.external_inference_url is None:
        return None
    return AdapterProbe(transport, api_key, config.served_names[0], config.state_dir / "scratch")


def _replicas(runtime: Runtime, watch: EngineWatch) -> Collection[str]:
    """The URLs of the servers behind the base model's router; none if it has no router. Those on a Ray cluster
    change."""
    config = runtime.config
    if not config.routed:
        return ()
    return frozenset(runtime.replica_urls) if config.ray is None else watch.server_urls


def _servers(runtime: Runtime, database: Database) -> Callable[[], Awaitable[list[PlacedServer]]] | None:
    if runtime.config.ray is None or not runtime.config.modes.manages_inference:
        return None

    async def read() -> list[PlacedServer]:
        return await database.read_async(lambda c: read_servers(c, runtime.placement_owner))

    return read


async def _engine_state(database: Database, config: ServerConfig) -> EngineState:
    return await database.read_async(lambda c: read_state(c, config.role.state_keys))
