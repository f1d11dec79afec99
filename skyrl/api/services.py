"""What the routes work with: typed objects, built once by the process, passed in."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from skyrl.api.access import Access
from skyrl.api.readiness import EngineWatch
from skyrl.api.signing import SignedUrls
from skyrl.api.tokens import Tokens
from skyrl.config.server import ServerConfig
from skyrl.db.audit import Audit
from skyrl.db.checkpoints import Checkpoints
from skyrl.db.copies import Copies
from skyrl.db.models import Models
from skyrl.db.samplers import Samplers
from skyrl.db.session_search import SessionSearch
from skyrl.db.sessions import Session, Sessions
from skyrl.db.usage import Usage
from skyrl.futures.store import FutureStore
from skyrl.futures.trace import Traces
from skyrl.inference.adapter_host import AdapterHost
from skyrl.notify.doorbell import SESSIONS, Doorbell
from skyrl.quotas.tenants import Quotas
from skyrl.sampling.client import ForwardingClient
from skyrl.sampling.service import SampleService
from skyrl.storage.base import CheckpointStore
from skyrl.wire.errors import NotFound, RequestError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Services:
    config: ServerConfig
    process_id: str
    sessions: Sessions
    models: Models
    samplers: Samplers
    checkpoints: Checkpoints
    checkpoint_store: CheckpointStore
    adapters: AdapterHost
    copies: Copies
    futures: FutureStore
    sampling: SampleService
    client: ForwardingClient | None
    engine: Doorbell
    watch: EngineWatch
    tokens: Tokens
    access: Access
    urls: SignedUrls
    search: SessionSearch
    audit: Audit
    usage: Usage
    traces: Traces
    quotas: Quotas

    async def active_session(self, session_id: str, tenant: str) -> Session:
        """Raises NotFound, or RequestError 410 when the session has ended."""
        session = await self.sessions.find(session_id, tenant)
        if session is None:
            raise NotFound(f"no session {session_id!r}", field="session_id")
        if session.status != "active":
            raise RequestError(f"session {session_id!r} is {session.status}", field="session_id", status=410)
        return session

    def check_base_model(self, name: str, field: str = "base_model") -> str:
        """The name, if this server serves it. Raises RequestError naming `field` and listing what there is."""
        served = (*self.config.served_names, self.config.base_model_path)
        if name not in served:
            raise RequestError(
                f"{name!r} is not served here; there is: {', '.join(self.config.served_names)}",
                field=field,
            )
        return name

    def tokenizer_name(self, base_model: str) -> str:
        """What clients load a tokenizer by: `tokenizer_id`, or a name with an organisation, or else the directory,
        which clients on this machine have: a plain alias would send them to the model hub."""
        if self.config.tokenizer_id is not None:
            return self.config.tokenizer_id
        path = self.config.base_model_path
        return path if "/" not in base_model and Path(path).is_dir() else base_model

    def session_warning(self) -> str | None:
        """What every user of this server should know before they train."""
        if self.config.losses.stable_reinforce == "cispo":
            return (
                "stable_reinforce has no published formula: this server computes cispo for it, with cispo's clip "
                "thresholds and without its per-sequence terms (metric stable_reinforce_is_cispo:max)"
            )
        return None

    def check_trainable(self) -> None:
        if not self.config.modes.trains:
            raise RequestError("this server only samples (backend 'none'); it has no trainer")

    async def close_session(
        self,
        session: Session,
        to: str,
        reason: str | None,
        detail: str | None,
        *,
        silent_since: float | None = None,
    ) -> None:
        """End a session: its samples stop, its pending requests are gone, the engine reclaims what it held. With
        `silent_since`, only if that is still its heartbeat."""
        if await self.sessions.end(session, to, reason, detail, silent_since=silent_since):
            await self._forget_session(session.id)

    async def _forget_session(self, session_id: str) -> None:
        """The session has ended. Fail the requests that arrived before this process learned of it."""
        self.sessions.forget(session_id)
        self.samplers.forget_session(session_id)
        self.models.forget_session(session_id)
        self.sampling.cancel(self.futures.drop_session(session_id))
        if not self.config.modes.trains:
            await self.futures.fail_session(session_id)
        self.engine.ring([SESSIONS])

    async def session_changed(self, session_id: str) -> None:
        """Another process has changed or ended this session."""
        if await self.sessions.reread(session_id):
            await self._forget_session(session_id)

    async def look_at_sessions(self) -> None:
        """Close those that are silent, and forget those that another process has closed."""
        look = await self.sessions.look(self.config.session_timeout_s)
        for session_id in look.ended:
            await self._forget_session(session_id)
        for session, heartbeat_at in look.silent:
            logger.info("session %s is silent; closing it", session.id)
            await self.close_session(session, "expired", None, None, silent_since=heartbeat_at)
