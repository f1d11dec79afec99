"""The objects that the routes use, built once by each process. Holds no rules of its own."""

from __future__ import annotations

from dataclasses import dataclass

from skyrl.base.config.server import ServerConfig
from skyrl.inference.adapter_host import AdapterHost
from skyrl.runtime.metrics.files import MetricsDirectory
from skyrl.runtime.metrics.processes import ApiMetrics
from skyrl.runtime.tracing.spans import Spans
from skyrl.server.api.access import Access
from skyrl.server.api.readiness import EngineWatch
from skyrl.server.api.ready_reasons import ReadyReasons
from skyrl.server.api.served import Served
from skyrl.server.api.session_life import SessionLife
from skyrl.server.api.signing import SignedUrls
from skyrl.server.api.tokens import Tokens
from skyrl.server.futures.store import FutureStore
from skyrl.server.futures.trace import Traces
from skyrl.server.openai.in_flight import InFlight
from skyrl.server.openai.models import ModelNames
from skyrl.server.openai.service import OpenAIService
from skyrl.server.pictures.ingress import PictureIngress
from skyrl.server.quotas.tenants import Quotas
from skyrl.server.request_status.finding import StatusFinder
from skyrl.server.sampling.client import ForwardingClient
from skyrl.server.sampling.loaded_weights import LoadedWeights
from skyrl.server.sampling.service import SampleService
from skyrl.storage.checkpoint_store.base import CheckpointStore
from skyrl.storage.db.adapter_uses import AdapterUses
from skyrl.storage.db.audit import Audit
from skyrl.storage.db.checkpoints import Checkpoints
from skyrl.storage.db.copies import Copies
from skyrl.storage.db.database import Database
from skyrl.storage.db.models import Models
from skyrl.storage.db.run_steps import Curves
from skyrl.storage.db.samplers import Samplers
from skyrl.storage.db.session_search import SessionSearch
from skyrl.storage.db.sessions import Sessions
from skyrl.storage.db.usage import Usage
from skyrl.storage.notify.doorbell import Doorbell


@dataclass(frozen=True)
class Services:
    config: ServerConfig
    process_id: str
    database: Database
    served: Served
    sessions: Sessions
    session_life: SessionLife
    models: Models
    samplers: Samplers
    checkpoints: Checkpoints
    checkpoint_store: CheckpointStore
    adapters: AdapterHost
    copies: Copies
    futures: FutureStore
    sampling: SampleService
    pictures: PictureIngress
    loaded: LoadedWeights | None
    """None if the inference servers never change their weights."""
    client: ForwardingClient | None
    engine: Doorbell
    watch: EngineWatch
    readiness: ReadyReasons
    tokens: Tokens
    access: Access
    urls: SignedUrls
    search: SessionSearch
    audit: Audit
    usage: Usage
    traces: Traces
    quotas: Quotas
    statuses: StatusFinder
    curves: Curves
    metrics: ApiMetrics
    published_metrics: MetricsDirectory
    """Where all processes of the server publish their metrics."""
    openai: OpenAIService | None
    """None if the engine samples."""
    openai_models: ModelNames
    openai_in_flight: InFlight
    adapter_uses: AdapterUses
    spans: Spans | None
    """None if nothing is traced."""
