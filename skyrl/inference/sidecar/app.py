"""The sidecar as an ASGI application: finds the route, asks for the admin key, and maps errors to answers.

All paths that change weights, pause, or free memory need the admin key, here and in vLLM. vLLM's own development routes
pass through the sidecar, and more of them come with each version. So the list names what is open, and everything else
needs the key."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from typing import Any

from prometheus_client import CollectorRegistry

from skyrl.http.admin_key import AdminKey
from skyrl.http.messages import ClientLeft, Receive, Reply, Scope, Send, json_reply
from skyrl.inference.sidecar.call import Call, error_reply
from skyrl.inference.sidecar.control import INSTEAD, VLLM_UPDATES, Control, Figures, SidecarMetrics
from skyrl.inference.sidecar.errors import Forbidden, NotOffered, SidecarError, Unauthorized
from skyrl.inference.sidecar.facts import KnownConfig, KnownFacts, WeightVersion
from skyrl.inference.sidecar.generation import Generation, generate
from skyrl.inference.sidecar.in_flight import InFlight, Pause
from skyrl.inference.sidecar.pass_through import OpenaiAnswers, pass_through
from skyrl.inference.sidecar.pictures import Pictures
from skyrl.inference.sidecar.settings import SidecarSettings
from skyrl.inference.sidecar.trainer_routes import Adapters, Memory, WeightRoutes
from skyrl.inference.sidecar.updates import Updates
from skyrl.inference.sidecar.vllm import Vllm
from skyrl.inference.sidecar.vllm_weights import VllmWeights
from skyrl.runtime.metrics.files import publishing
from skyrl.runtime.metrics.process import LoopLag
from skyrl.runtime.processes.supervision import set_within

_V1 = "/v1/"
_ADAPTERS = frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter"})
_OPEN_AT_VLLM = frozenset(
    {
        *("/classify", "/cohere/v2/chat", "/detokenize", "/embed", "/generative_scoring", "/get_world_size"),
        *("/inference/v1/generate", "/invocations", "/is_paused", "/is_sleeping", "/load", "/ping"),
        *("/pooling", "/rerank", "/score", "/tokenize", "/tokenizer_info"),
        *("/v2/embed", "/v2/rerank", "/version", "/weight_info"),
    }
)


def needs_admin(path: str, open_here: Collection[str]) -> bool:
    """`open_here`: the sidecar's own paths that every client may use."""
    if path in open_here or path in _OPEN_AT_VLLM:
        return False
    return not path.startswith(_V1) or path in _ADAPTERS


logger = logging.getLogger(__name__)


class Sidecar:
    """An ASGI application. Make it with `open_sidecar`."""

    def __init__(self, settings: SidecarSettings, vllm: Vllm) -> None:
        self.figures: Figures | None = None
        facts, version = KnownFacts(vllm), WeightVersion(vllm)
        self.in_flight = InFlight(vllm, settings.max_in_flight, settings.abort_s)
        self._settings = settings
        self._vllm = vllm
        self.pictures = Pictures()
        self._generation = Generation(vllm, facts, version, self.in_flight, self.pictures)
        self._openai = OpenaiAnswers(facts, version)
        self.pause = Pause(vllm, self.in_flight, settings.abort_s, settings.rpc_s)
        weights = VllmWeights(vllm, settings.rpc_s)
        self.updates = Updates(settings, vllm, weights, version, self.in_flight, self.pause)
        config = KnownConfig(vllm)
        control = Control(settings, vllm, facts, version, config, self.in_flight, self.pause, self.updates)
        self._routes: dict[str, Callable[[Call], Awaitable[Any]]] = {
            "/health": control.health,
            "/health_generate": control.health_generate,
            "/flush_cache": control.flush_cache,
            "/v1/loads": control.loads,
            "/get_load": control.old_load,
            "/server_info": control.server_info,
            "/get_server_info": control.server_info,
            "/model_info": control.model_info,
            "/get_model_info": control.model_info,
            "/weight_version": control.weight_version,
            "/get_weight_version": control.weight_version,
            "/abort_request": control.abort_request,
            "/remove_worker": control.removed,
            "/metrics": self._metrics,
        }
        self._open_paths = frozenset({*self._routes, "/generate"})
        memory = Memory(vllm, config, self.in_flight, self.pause, self.updates)
        admin = WeightRoutes(self.pause, self.updates, memory, Adapters(vllm)).routes()
        self._routes |= admin
        self._admin_key = AdminKey(settings.admin_key)

    @property
    def paths(self) -> frozenset[str]:
        """The paths that are the sidecar's own. All others are vLLM's."""
        return frozenset({*self._routes, "/generate"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        call = Call(scope, receive, send, self._settings.max_body_bytes)
        try:
            await self._route(call)
        except ClientLeft:
            pass
        except SidecarError as error:
            if call.send.status is None:
                await error_reply(error).send(call.send)
            else:
                logger.warning("an answer of %s ended early: %s", call.path, error)

    async def _route(self, call: Call) -> None:
        if call.path in VLLM_UPDATES:
            raise NotOffered(f"{call.path}: vLLM's own weight transfer is not offered here: {INSTEAD}")
        if needs_admin(call.path, self._open_paths) and (refusal := self._admin_key.refusal(call.scope)) is not None:
            raise Unauthorized(refusal[1]) if refusal[0] == 401 else Forbidden(refusal[1])
        if call.path == "/generate" and call.method in ("POST", "PUT"):
            await generate(call, self._generation)
        elif (route := self._routes.get(call.path)) and call.method in ("GET", "POST"):
            answer = await route(call)
            await (answer if isinstance(answer, Reply) else json_reply(200, answer)).send(call.send)
        else:
            await pass_through(call, self._vllm, self.in_flight, self._openai)

    async def _metrics(self, _: Call) -> Reply:
        assert self.figures is not None
        return await self.figures.answer()

    async def drain(self) -> None:
        """Take no more samples. Give those in flight time to end, then abort them, and give that time to end."""
        self.in_flight.draining = True
        if not await set_within(self.in_flight.idle, self._settings.drain_s):
            try:
                await self.in_flight.abort_all()
            except SidecarError as error:
                logger.warning("samples that pass through were not aborted: %s", error)
            await set_within(self.in_flight.idle, self._settings.abort_s + 1)


@contextlib.asynccontextmanager
async def open_sidecar(settings: SidecarSettings) -> AsyncIterator[Sidecar]:
    """The sidecar with its connections to vLLM and its background work, which end with it."""
    vllm = Vllm(settings)
    sidecar, registry = Sidecar(settings, vllm), CollectorRegistry()
    registry.register(SidecarMetrics(sidecar.in_flight, sidecar.pause))
    async with publishing(registry, f"sidecar-{settings.number}", settings.metrics_directory) as published:
        sidecar.figures = figures = Figures(vllm, settings.number, published)
        work = (sidecar.in_flight.run, sidecar.pause.run, sidecar.updates.run, figures.run, LoopLag(registry).run)
        background = [asyncio.create_task(run()) for run in work]
        try:
            yield sidecar
        finally:
            for task in background:
                task.cancel()
            await asyncio.wait(background)
            await sidecar.pictures.close()
            await vllm.close()
