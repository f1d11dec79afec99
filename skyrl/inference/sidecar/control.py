"""SGLang's control routes: health, load, cache, aborts, what the server is, and its metrics. Each answers GET and POST.

vLLM's own calls for new weights, which trainers make to a vLLM without a sidecar, are refused: vLLM writes what arrives
into the model that serves, so a half of an update would be sampled from, and no sample could say which weights it
has."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from skyrl import __version__
from skyrl.base.pictures.vision import NoVision, VisionConfig
from skyrl.http.messages import Reply
from skyrl.inference.metrics import shown
from skyrl.inference.sidecar.call import PLAIN, Call, boolean, number, parameters, string
from skyrl.inference.sidecar.errors import BadRequest, NotOffered, SidecarError, VllmAway
from skyrl.inference.sidecar.facts import KnownConfig, KnownFacts, WeightVersion, is_paused
from skyrl.inference.sidecar.in_flight import InFlight, Pause, PauseMode
from skyrl.inference.sidecar.settings import SidecarSettings
from skyrl.inference.sidecar.updates import Updates
from skyrl.inference.sidecar.vllm import Vllm
from skyrl.runtime.metrics.files import CONTENT_TYPE, MetricsDirectory

VLLM_UPDATES = frozenset(
    {
        *("/init_weight_transfer_engine", "/start_weight_update", "/start_draft_weight_update", "/update_weights"),
        *("/finish_weight_update", "/shutdown_weight_transfer_engine"),
    }
)
INSTEAD = (
    "send new weights with /update_weights_from_disk, or with /init_weights_update_group and "
    "/update_weights_from_distributed (skyrl.weights has clients of these), or train against a vLLM without a sidecar"
)


FLUSHED = b"Cache flushed.\n"
BUSY = "Flush cache failed: requests are running or waiting."


@dataclass(frozen=True)
class Control:
    """The routes. Each returns its answer: a Reply, or what becomes JSON."""

    settings: SidecarSettings
    vllm: Vllm
    facts: KnownFacts
    version: WeightVersion
    config: KnownConfig
    in_flight: InFlight
    pauses: Pause
    updates: Updates

    async def health(self, _: Call) -> Reply:
        """vLLM's own answer, or 503. Also 503 while its weights are not whole."""
        return _plain(await self._healthy())

    async def _healthy(self) -> bytes:
        """The body of vLLM's answer. Raises VllmAway."""
        if self.in_flight.draining:
            raise VllmAway("the sidecar is stopping")
        try:
            health = await self.vllm.health()
            if health.status == 200:
                await self.updates.see_start(health.start)
        except SidecarError as error:
            raise VllmAway(error.message) from error
        if self.updates.trouble is not None:
            raise VllmAway(self.updates.trouble)
        if health.status != 200:
            raise VllmAway(f"vLLM is not healthy: {health.body.decode('utf-8', 'replace') or health.status}")
        return health.body

    async def health_generate(self, _: Call) -> Reply:
        """Whether vLLM can sample a token. While it is paused it cannot, and yet is healthy."""
        try:
            body = await self._healthy()
            if await is_paused(self.vllm):
                return _plain(body)
            facts = await self.facts.get()
            body = {"model": facts.model, "prompt": [0], "max_tokens": 1, "temperature": 0.0, "ignore_eos": True}
            async with asyncio.timeout(self.settings.health_token_s):
                await self.vllm.complete(body, "sidecar-health")
        except TimeoutError:
            raise VllmAway(f"vLLM sampled no token within {self.settings.health_token_s:g} s") from None
        except SidecarError as error:
            self.facts.forget()
            raise VllmAway(error.message) from error
        return _plain(b"")

    async def loads(self, _: Call) -> Any:
        running, waiting = self.in_flight.running, self.in_flight.waiting
        total = {"total_running_reqs": running, "total_waiting_reqs": waiting, "total_reqs": running + waiting}
        loads = {"loads": [self._load()], "aggregate": total}
        return {"version": __version__, "stages_updates": True} | loads

    async def old_load(self, _: Call) -> Any:
        return [self._load()]

    def _load(self) -> dict[str, int]:
        running, waiting = self.in_flight.running, self.in_flight.waiting
        return {
            "dp_rank": 0,
            "num_running_reqs": running,
            "num_waiting_reqs": waiting,
            "num_total_reqs": running + waiting,
            "num_reqs": running + waiting,
        }

    async def flush_cache(self, call: Call) -> Reply:
        """`?timeout=s` waits for the end of what is in flight. 400 if something is, or is frozen."""
        given = (await parameters(call)).get("timeout")
        timeout_s = 0.0 if given is None else number("timeout", given, 0)
        if timeout_s > 0 and self.pauses.mode is not PauseMode.RETRACT:  # what is frozen does not end
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(timeout_s, 3600)), call.body.while_connected():
                    await self.in_flight.quiet.wait()
        retracted = self.pauses.mode is PauseMode.RETRACT
        if not self.in_flight.quiet.is_set() and not retracted:
            raise BadRequest(BUSY)
        query = "?reset_running_requests=true" if retracted else ""
        answer = await self.vllm.call("POST", f"/reset_prefix_cache{query}")
        if not (isinstance(answer, dict) and answer.get("success") is True):
            raise BadRequest(BUSY)
        return _plain(FLUSHED)

    async def abort_request(self, call: Call) -> Reply:
        """The aborted requests answer by themselves. An unknown rid is no error: the request may just have ended."""
        given = await parameters(call)
        rid = given.get("rid")
        if boolean("abort_all", given.get("abort_all") or False):
            await self.in_flight.abort_all()
        elif rid is not None and string("rid", rid):
            self.in_flight.abort(rid)
        return _plain(b"")

    async def weight_version(self, _: Call) -> Any:
        return {"weight_version": await self._known_version()}

    async def model_info(self, _: Call) -> Any:
        facts = await self.facts.get()
        config = await asyncio.to_thread(_model_config, facts.root)
        return {
            "model_path": facts.root,
            "tokenizer_path": facts.root,
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": await self._known_version(),
            "has_image_understanding": None if config is None else await self._takes_images(facts.root),
            "has_audio_understanding": None if config is None else "audio_config" in config,
            "model_type": None if config is None else config.get("model_type"),
            "architectures": None if config is None else config.get("architectures"),
        }

    async def _takes_images(self, root: str) -> bool:
        try:
            await asyncio.to_thread(VisionConfig.of, root)
        except NoVision:
            return False
        return not await self.config.only_text()

    async def server_info(self, call: Call) -> Any:
        """What this server knows. SGLang's other arguments have no meaning for vLLM. Raises NotOffered for vLLM's form
        of the answer."""
        if "config_format" in parse_qs(call.query.decode("latin-1"), keep_blank_values=True):
            raise NotOffered(
                f"config_format: vLLM's configuration is not shown here. For its weight transfer: {INSTEAD}"
            )
        facts = await self.facts.get()
        return {
            "model_path": facts.root,
            "tokenizer_path": facts.root,
            "served_model_name": facts.model,
            "host": self.settings.host,
            "port": self.settings.port,
            "context_length": facts.context,
            "weight_version": await self._known_version(),
            "skip_tokenizer_init": False,
            "max_running_requests": self.settings.max_in_flight,
            **await self.config.get(),
            "internal_states": [],
            "version": __version__,
        }

    async def removed(self, _: Call) -> Any:
        """Clients of some routers send `/remove_worker` to the worker itself. There is nothing to do."""
        return {"success": True, "message": "this server keeps no workers"}

    async def _known_version(self) -> str:
        version = await self.version.get()
        if version is None:
            raise VllmAway("vLLM did not answer the version of its weights")
        return version


def _plain(body: bytes) -> Reply:
    return Reply(200, PLAIN if body else [], body)


def _model_config(root: str) -> dict[str, Any] | None:
    """The model's `config.json`; None if the model is not a directory of this machine."""
    try:
        read = json.loads((Path(root) / "config.json").read_text())
    except (OSError, ValueError):
        return None
    return read if isinstance(read, dict) else None


logger = logging.getLogger(__name__)

PERIOD_S = 5.0
TIMEOUT_S = 1.0


class SidecarMetrics(Collector):
    """Read at each writing, on another thread."""

    def __init__(self, in_flight: InFlight, pause: Pause) -> None:
        self._in_flight, self._pause = in_flight, pause

    def collect(self) -> Iterable[Metric]:
        about = "Samples that vLLM has."
        yield GaugeMetricFamily("skyrl_sidecar_running", about, value=self._in_flight.running)
        about = "Samples that wait in the sidecar, because generation is paused."
        yield GaugeMetricFamily("skyrl_sidecar_waiting", about, value=self._in_flight.waiting)
        about = "1 while somebody has paused generation."
        yield GaugeMetricFamily("skyrl_sidecar_paused", about, value=self._pause.mode is not None)


class Figures:
    """Publishes the metrics of the vLLM with this number, and answers `GET /metrics` with these and the sidecar's. The
    router of a plane answers for all processes."""

    def __init__(self, vllm: Vllm, number: int, published: MetricsDirectory) -> None:
        self._vllm, self._number, self._published = vllm, number, published
        self._names = (f"sidecar-{number}", f"vllm-{number}")

    async def run(self) -> None:
        """Publish until cancelled, for those who ask the router."""
        while True:
            await self._publish()
            await asyncio.sleep(PERIOD_S)

    async def answer(self) -> Reply:
        """vLLM's metrics as they are now, if it answers at once."""
        await self._publish()
        text = await asyncio.to_thread(self._published.read, self._names)
        return Reply(200, [(b"content-type", CONTENT_TYPE.encode())], text.encode())

    async def _publish(self) -> None:
        """A failure is only logged: `/health` says more."""
        try:
            text = await self._vllm.call_raw("GET", "/metrics", timeout_s=TIMEOUT_S)
            await asyncio.to_thread(self._write, text.decode())
        except (SidecarError, OSError, ValueError) as error:
            logger.debug("vLLM shows no metrics: %s", error)

    def _write(self, text: str) -> None:
        self._published.write(f"vllm-{self._number}", shown(text, self._number))
