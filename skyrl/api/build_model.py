"""Builds what an API process has for one base model: how it is sampled from, and what is known of its engine."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from functools import partial

from skyrl.api.metrics import ApiMetrics, ModelMetrics
from skyrl.api.served import EngineWatch, ReadyReasons, ServedModel
from skyrl.base.config.server import ServerConfig, vision_of
from skyrl.base.model_files import model_config, template_of, whole_config
from skyrl.base.types.placed_server import PlacedServer
from skyrl.chat.agents.rendering.loaded_models import has_system_role
from skyrl.chat.openai.messages import ChatPictures, difference, efforts_of
from skyrl.chat.openai.service import OpenAIService
from skyrl.http.client import HttpClient
from skyrl.inference.adapter_host import AdapterHost, HostOfOtherServer, SharedDirectory, StoredAdapters
from skyrl.inference.features import InferenceFeatures
from skyrl.runtime.processes.runtime import Runtime
from skyrl.sampling.base_model import BaseModelSampling, ForwardedSamples
from skyrl.sampling.client import ForwardingClient
from skyrl.sampling.gate import Admission, FairOrder, SamplingGate
from skyrl.sampling.job import FeatureGuard
from skyrl.sampling.pictures import PictureChecks, PictureIngress
from skyrl.sampling.quotas import Quotas
from skyrl.sampling.servers import CurrentWeightsCheck, EngineEndpoint, FixedEndpoint
from skyrl.storage.checkpoint_store.base import CheckpointStore
from skyrl.storage.db.adapter_versions import AdapterUses
from skyrl.storage.db.checkpoints import Checkpoints
from skyrl.storage.db.database import Database
from skyrl.storage.db.engine_state import EngineState, read_state
from skyrl.storage.db.pictures import PictureFiles
from skyrl.storage.db.processes import read_servers
from skyrl.storage.db.samplers import Samplers
from skyrl.storage.db.usage import UsageCounter
from skyrl.storage.futures.store import FutureStore


@dataclass(frozen=True)
class Shared:
    """What the base models of a server share in an API process."""

    database: Database
    metrics: ApiMetrics
    futures: FutureStore
    samplers: Samplers
    checkpoints: Checkpoints
    store: CheckpointStore
    admission: Admission
    quotas: Quotas
    usage: UsageCounter
    uses: AdapterUses
    files: PictureFiles
    checks: PictureChecks


def build_model(runtime: Runtime, features: InferenceFeatures, metrics: ModelMetrics, shared: Shared) -> ServedModel:
    """`features` are those of the base model's inference server, `metrics` those of the base model."""
    config, database = runtime.config, shared.database
    read, name = partial(_engine_state, database, config), config.role.state_keys[0]
    context = model_config(config.base_model_path).get("max_position_embeddings")
    watch = EngineWatch(read, config.modes, _servers(runtime, database), name, context)
    adapters = _adapters(config, watch, shared)
    current_weights = CurrentWeightsCheck(database, config.role.own) if config.full_finetuning else None
    transport = HttpClient(config.forwarding_inference_max_connections)
    client = _client(runtime, watch, adapters, transport, current_weights, metrics, shared)
    sight = vision_of(config)
    gate = SamplingGate(
        shared.usage.count,
        metrics.samples,
        order=FairOrder() if config.modes.own_inference or config.external_inference_priority else None,
        admission=shared.admission,
        quotas=shared.quotas,
        refusals=shared.metrics.refusals,
    )
    guard = FeatureGuard(features)
    sampling = BaseModelSampling(
        base_name=config.served_names[0],
        limits=watch.limits,
        client=client,
        gate=gate,
        guard=guard,
        pictures=PictureIngress(
            database, shared.checks, shared.files, sight, config.max_stored_image_bytes, shared.metrics.images
        ),
        forwarded=ForwardedSamples(client, shared.futures, shared.samplers, gate),
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
            shared.uses,
            ChatPictures(shared.checks, sight),
            has_system_role=has_system_role(config.base_model_path),
            takes_documents=any(text is None or "documents" in text for text in templates),
            efforts=efforts_of(template),
            renderer_note=difference(whole_config(config.base_model_path).get("model_type", ""), template),
        )
    return ServedModel(runtime, sampling, watch, ReadyReasons(config, watch, client), adapters, openai)


def _adapters(config: ServerConfig, watch: EngineWatch, shared: Shared) -> AdapterHost:
    store, store_key_of = shared.store, shared.checkpoints.store_key_of
    stored = StoredAdapters(store, store_key_of)
    if config.weights_travel:
        return stored
    directory = SharedDirectory(partial(watch.adapters_in, config.state_dir), store, store_key_of)
    if not config.modes.shares_inference:
        return directory

    async def host() -> AdapterHost:
        return stored if (await watch.refresh()).state_dir is None else directory

    return HostOfOtherServer(host)


def _adapter_places(config: ServerConfig) -> int | None:
    """How many adapters the inference servers run at a time; None for servers that skyrl does not run, or that run no
    adapters."""
    backend = config.backend_config
    if config.full_finetuning or not config.modes.manages_inference:
        return None
    return backend.lora.max_loras * backend.inference.num_engines


def _client(
    runtime: Runtime,
    watch: EngineWatch,
    adapters: AdapterHost,
    transport: HttpClient,
    current_weights: CurrentWeightsCheck | None,
    metrics: ModelMetrics,
    shared: Shared,
) -> ForwardingClient | None:
    """None if the engine runs the samples."""
    config = runtime.config
    if not config.modes.forwards:
        return None
    external = config.external_inference_url
    published = partial(_engine_state, shared.database, config)
    return ForwardingClient(
        transport,
        EngineEndpoint(published) if external is None else FixedEndpoint(external),
        adapters,
        api_key=runtime.inference_api_key,
        deadline_s=config.forwarding_deadline_s,
        zero_fill_logprobs=config.forwarding_zero_fill_logprobs,
        replicas=_replicas(runtime, watch),
        current_weights=current_weights,
        shares_keys=config.routed or config.modes.shares_inference,
        metrics=metrics.adapters,
        pictures=shared.files,
    )


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
