"""The objects that the routes use, built once by each process. Holds no rules of its own."""

from __future__ import annotations

from dataclasses import dataclass

from skyrl.api.access import Access, Tokens
from skyrl.api.metrics import ApiMetrics
from skyrl.api.request_status.finding import StatusFinder
from skyrl.api.served import Served, ServerReadiness, Tokenizers
from skyrl.api.session_life import FullPlace, SessionLife
from skyrl.api.signed_links import SignedUrls
from skyrl.api.timeline import Traces
from skyrl.base.config.server import ServerConfig
from skyrl.chat.agents.rendering.loaded_models import ModelContinuations
from skyrl.chat.agents.turns import TurnRunner
from skyrl.chat.openai.models import ModelNames
from skyrl.chat.openai.service import InFlight
from skyrl.runtime.metrics.files import MetricsDirectory
from skyrl.runtime.tracing import Spans
from skyrl.sampling.pictures import PictureChecks
from skyrl.sampling.quotas import Quotas
from skyrl.sampling.service import SampleService
from skyrl.storage.checkpoint_store.base import CheckpointStore
from skyrl.storage.db.adapter_versions import AdapterUses
from skyrl.storage.db.agents import AgentSessions, AgentTurns
from skyrl.storage.db.audit import Audit
from skyrl.storage.db.checkpoints import Checkpoints, Copies
from skyrl.storage.db.database import Database
from skyrl.storage.db.models import Models
from skyrl.storage.db.run_steps import Curves
from skyrl.storage.db.samplers import Samplers
from skyrl.storage.db.session_search import SessionSearch
from skyrl.storage.db.sessions import Sessions
from skyrl.storage.db.usage import Usage
from skyrl.storage.doorbell import Doorbell
from skyrl.storage.futures.store import FutureStore


@dataclass(frozen=True)
class Services:
    config: ServerConfig
    process_id: str
    database: Database
    served: Served
    sessions: Sessions
    session_life: SessionLife
    full_place: FullPlace
    models: Models
    samplers: Samplers
    checkpoints: Checkpoints
    checkpoint_store: CheckpointStore
    copies: Copies
    futures: FutureStore
    sampling: SampleService
    picture_checks: PictureChecks
    engine: Doorbell
    readiness: ServerReadiness
    tokenizers: Tokenizers
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
    openai_models: ModelNames
    openai_in_flight: InFlight
    agents: TurnRunner
    agent_sessions: AgentSessions
    agent_turns: AgentTurns
    agent_continuations: ModelContinuations
    adapter_uses: AdapterUses
    spans: Spans | None
    """None if nothing is traced."""

    async def refresh(self) -> None:
        """Read the engines' states."""
        for model in self.served:
            await model.watch.refresh()
