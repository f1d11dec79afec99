"""What this server serves: its base models by their names, each with what an API process has for it, and whether each
can train and sample, and why not: for `/readyz`, the status page and `skyrl status`.

`EngineWatch` is the engine's state as the API process last read it: after each notice, and every few seconds.
`Readiness` limits how often probes find out whether the server is ready. `Tokenizers` tells a client that its session
trains one base model and samples from another whose token ids mean something else. Recipes send token ids of one to the
other, as in distillation. The ids may be in both vocabularies: then nothing fails, and nothing is learned. Nothing is
refused here: a judge, which gets text, may have any tokenizer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, TypeVar

from skyrl.base.config.base_models import Modes
from skyrl.base.config.server import ServerConfig
from skyrl.base.config.several import ByName
from skyrl.base.model_files import FROZEN_WARNING, Shared, is_mixture, shared_ids
from skyrl.base.types.activity import EngineActivity, decode_activity
from skyrl.base.types.context_limits import ContextLimits
from skyrl.base.types.placed_server import PlacedServer
from skyrl.base.wire.errors import RequestError
from skyrl.chat.openai.service import OpenAIService
from skyrl.inference.adapter_host import AdapterHost
from skyrl.runtime.processes.host_resources import shortage
from skyrl.runtime.processes.runtime import Runtime
from skyrl.sampling.base_model import BaseModelSampling
from skyrl.sampling.client import ForwardingClient
from skyrl.storage.db.engine_state import ONLY_SAMPLED, EngineState
from skyrl.storage.db.sessions import Sessions

T = TypeVar("T")

POLL_S = 2.0
STALE_S = 15.0
"""An engine without a heartbeat for this long counts as gone. A thread of its own writes one every 3 s."""

FRESH_S = 1.0
"""How long an answer about readiness is used again."""


def _mark_exception_as_seen(task: asyncio.Task[Any]) -> None:
    """If all waiters have gone, nobody reads the exception of a failed task, and asyncio would log that."""
    if not task.cancelled():
        task.exception()


class EngineWatch:
    """The row `engine_state` as last read, and what follows from it. `read_servers` reads the rows of the vLLMs that
    this server runs on a Ray cluster; None if it runs none there. `base_model` and `model_context` are as in
    `ContextLimits`."""

    def __init__(
        self,
        read: Callable[[], Awaitable[EngineState]],
        modes: Modes,
        read_servers: Callable[[], Awaitable[list[PlacedServer]]] | None = None,
        base_model: str = "",
        model_context: int | None = None,
    ) -> None:
        self._base_model = base_model
        self._model_context = model_context
        self._read = read
        self._modes = modes
        self._read_servers = read_servers
        self.state = EngineState()
        self.servers: list[PlacedServer] = []
        self.server_urls: set[str] = set()
        """The URLs of `servers` that run. The same set for ever: others hold it."""
        self._activity: tuple[str | None, EngineActivity] = (None, EngineActivity())
        """The text that was decoded last, and what it says."""

    async def refresh(self) -> EngineState:
        self.state = await self._read()
        if self._read_servers is not None:
            self.servers = await self._read_servers()
            urls = {server.url for server in self.servers if server.url is not None}
            self.server_urls.intersection_update(urls)
            self.server_urls.update(urls)
        return self.state

    def why_away(self) -> str:
        """Why no inference server is there, for tenants; empty if that is unknown."""
        return "" if self.state.inference_proxy_url else "; ".join(server.for_tenants for server in self.servers)

    @property
    def missing_servers(self) -> list[str]:
        """A sentence for each vLLM that does not run on the Ray cluster, or whose node does not answer."""
        return [server.sentence for server in self.servers if server.reason]

    def limits(self) -> ContextLimits:
        return ContextLimits(self.state.vocab_size, self.state.max_context, self._base_model, self._model_context)

    def adapters_in(self, own: Path) -> Path:
        """The state directory that holds the adapters' files: `own`, which is this server's, or on a gateway that of
        the server that trains on the same database."""
        return own if self._modes.trains or self.state.state_dir is None else Path(self.state.state_dir)

    def ready_parts(self) -> dict[str, bool]:
        """The parts that this server has, each with whether it can work right now."""
        reasons = self.reasons()
        parts = {"training": self._modes.trains, "sampling": self._modes.own_inference}
        return {
            part: not any(reason.startswith(f"{part}:") for reason in reasons)
            for part, is_here in parts.items()
            if is_here
        }

    def reasons(self) -> list[str]:
        """Why the server cannot train or sample right now; empty when it can."""
        reasons: list[str] = []
        if self._modes.trains and (trouble := self.training_trouble()) is not None:
            reasons.append(f"training: {trouble}")
        if self._modes.own_inference and self.state.inference_proxy_url is None:
            starting = "; ".join(server.sentence for server in self.servers)
            reasons.append(f"sampling: {starting or self._given_up or 'no inference server has been published'}")
        return reasons

    @property
    def _given_up(self) -> str:
        """Why the vLLMs of a base model without an engine are missing, if the launcher has said so. Where there is an
        engine, that is why nothing can be trained."""
        alone = self._modes.manages_inference and not self._modes.trains
        return self.state.reason if alone and self.state.reason != ONLY_SAMPLED else ""

    def training_trouble(self) -> str | None:
        """Why the engine of this database cannot train now; None if it can."""
        state = self.state
        if not state.training_ready:
            return state.reason or "the engine is starting"
        silent_s = time.time() - state.heartbeat_at
        return f"the engine was last heard of {silent_s:.0f} s ago" if silent_s > STALE_S else None

    @property
    def activity(self) -> EngineActivity:
        """What the engine did when it was last heard of."""
        text = self.state.activity
        if text != self._activity[0]:
            self._activity = (text, decode_activity(text))
        return self._activity[1]


class Readiness(Generic[T]):
    """Calls `find` at most once a second, and never twice at a time, however many probes arrive: `/readyz` needs no
    key, and `find` reads the database and may ask another server."""

    def __init__(self, find: Callable[[], Awaitable[T]], clock: Callable[[], float] = time.monotonic) -> None:
        self._find = find
        self._clock = clock
        self._finding: asyncio.Task[T] | None = None
        self._found: tuple[float, T] | None = None

    async def now(self) -> T:
        """Raises what `find` raises; the next call tries again."""
        if self._found is not None and self._clock() - self._found[0] < FRESH_S:
            return self._found[1]
        if self._finding is None:
            self._finding = asyncio.create_task(self._refresh())
            self._finding.add_done_callback(_mark_exception_as_seen)
        return await asyncio.shield(self._finding)  # the caller may go away while others wait for the same task

    async def _refresh(self) -> T:
        try:
            found = await self._find()
            self._found = (self._clock(), found)
            return found
        finally:
            self._finding = None


Reasons = tuple[bool, list[str]]
"""Whether something is ready, and the reasons to list."""


class ReadyReasons:
    """One base model: looks at its engine and its inference servers, at most once a second. `replicas` is None unless a
    router stands in front of several inference servers."""

    def __init__(self, config: ServerConfig, watch: EngineWatch, client: ForwardingClient | None) -> None:
        self._config = config
        self._watch = watch
        self._client = client
        self.replicas = Readiness(client.replicas_in_use) if config.routed and client is not None else None
        self._readiness = Readiness(self._find)

    async def now(self) -> Reasons:
        """Missing replicas are listed, but the base model stays ready while one replica is in use: samples go on."""
        return await self._readiness.now()

    async def _find(self) -> Reasons:
        await self._watch.refresh()
        reasons = self._watch.reasons()
        if not reasons and not self._config.modes.manages_inference and self._client is not None:
            failure = await self._client.probe()
            reasons = [f"sampling: {failure}"] if failure is not None else []
        ready = not reasons
        replicas = self._config.backend_config.inference.num_engines
        if ready and self.replicas is not None and (used := await self.replicas.now()) < replicas:
            ready = used > 0
            missing = self._watch.missing_servers
            reasons = ["; ".join([f"sampling: {used} of {replicas} replicas are in use", *missing])]
        return ready, reasons


class ServerReadiness:
    """The whole server. With several base models it is ready while one of them is: requests for that one are served.
    The reasons of the others are listed, each after the base model's name."""

    def __init__(self, state_dir: Path, models: Mapping[str, ReadyReasons]) -> None:
        """`models` by the name that clients know."""
        self._state_dir = state_dir
        self._models = dict(models)

    async def by_model(self) -> dict[str, Reasons]:
        found = await asyncio.gather(*(model.now() for model in self._models.values()))
        return dict(zip(self._models, found, strict=True))

    async def now(self) -> Reasons:
        """Too little disk space is listed, but the server stays ready."""
        found = await self.by_model()
        several = len(found) > 1
        reasons = [f"{name}: {why}" if several else why for name, (_, whys) in found.items() for why in whys]
        return any(ready for ready, _ in found.values()), [*reasons, *self.of_server()]

    def of_server(self) -> list[str]:
        """The reasons that are of no base model."""
        disk_shortage = shortage(self._state_dir)
        return [] if disk_shortage is None else [f"disk: {disk_shortage}"]


@dataclass(frozen=True)
class ServedModel:
    """One base model. `openai` is None if the engine samples."""

    runtime: Runtime
    sampling: BaseModelSampling
    watch: EngineWatch
    readiness: ReadyReasons
    adapters: AdapterHost
    openai: OpenAIService | None

    @property
    def config(self) -> ServerConfig:
        """The configuration of this base model."""
        return self.runtime.config

    @property
    def name(self) -> str:
        """The first name by which clients know this base model."""
        return self.config.served_names[0]

    @cached_property
    def _is_mixture(self) -> bool:
        return self.config.modes.trains and is_mixture(self.config.base_model_path)

    @property
    def refuses_mlp(self) -> bool:
        """Whether adapters may not ask for `train_mlp`. False also for a model of the hub that was not on this machine
        when this process started; the trainer then refuses."""
        return self.config.backend_config.lora.train_mlp_of_mixtures == "refuse" and self._is_mixture

    def tokenizer_name(self, name: str) -> str:
        """The name by which clients load a tokenizer: `tokenizer_id` if configured; the model's directory if `name` is
        an alias; else `name`. Clients would look for an alias on the model hub; the directory works on this machine."""
        if self.config.tokenizer_id is not None:
            return self.config.tokenizer_id
        path = self.config.base_model_path
        return path if "/" not in name and Path(path).is_dir() else name

    @property
    def warning(self) -> str | None:
        """What a client should know before it trains this base model; None if there is nothing."""
        leaves_out = self.config.backend_config.lora.train_mlp_of_mixtures == "leave_out"
        return FROZEN_WARNING if not self.config.full_finetuning and leaves_out and self._is_mixture else None


class Served:
    """All base models of a server, in the order of its configuration."""

    def __init__(self, models: Sequence[ServedModel], names: ByName) -> None:
        self._models = tuple(models)
        self._names = names
        self._trains = any(model.config.modes.trains for model in self._models)

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._models)

    def __len__(self) -> int:
        return len(self._models)

    def __getitem__(self, number: int) -> ServedModel:
        return self._models[number]

    def named(self, name: str, field: str = "base_model") -> ServedModel:
        """The base model that a client names. Raises RequestError naming `field` and listing the names that are
        served."""
        number = self._names.numbers.get(name)
        if number is None:
            raise RequestError(f"{name!r} is not served here; there is: {', '.join(self._names.served)}", field=field)
        return self._models[number]

    def all_names(self, names: Collection[str]) -> tuple[str, ...]:
        """These names of base models, and the other names of those that are served."""
        numbers = {number for name in names if (number := self._names.numbers.get(name)) is not None}
        served = (name for number in sorted(numbers) for name in self._models[number].config.served_names)
        return tuple(dict.fromkeys([*names, *served]))

    def number_of(self, stored: str) -> int:
        """The number of the base model of a stored row; 0 if it is served no more under this name."""
        return self._names.numbers.get(stored, 0)

    def of(self, stored: str) -> ServedModel:
        """The base model of a stored row; the only or first one if it is served no more under this name."""
        return self._models[self.number_of(stored)]

    def trainable(self, name: str, field: str = "base_model") -> ServedModel:
        """As `named`, for training. Raises RequestError for a base model that is only sampled from."""
        self.check_trains()
        model = self.named(name, field)
        if not model.config.modes.trains:
            trained = [name for one in self._models if one.config.modes.trains for name in one.config.served_names]
            raise RequestError(
                f"{name!r} is only sampled from here; base models that train: {', '.join(trained)}", field=field
            )
        return model

    def for_checkpoint(self, trained_from: str, wanted: str | None) -> ServedModel:
        """The base model with which a new model begins from a checkpoint. `trained_from`: the checkpoint's base model,
        which the only base model of a server may have had as an earlier name. `wanted`: the one that the client names,
        if it names one. Raises RequestError."""
        if len(self._models) == 1:
            return self._models[0] if wanted is None else self.trainable(wanted)
        from_checkpoint = self.trainable(trained_from, "path")
        if wanted is not None and self.trainable(wanted) is not from_checkpoint:
            raise RequestError(
                f"the checkpoint was trained from {trained_from!r}, not from {wanted!r}", field="base_model"
            )
        return from_checkpoint

    def check_trains(self) -> None:
        """Raises RequestError on a server without a trainer."""
        if not self._trains:
            raise RequestError("this server only samples (backend 'none'); it has no trainer")

    def session_warning(self) -> str | None:
        """What a client should know before it trains; None if there is nothing."""
        warnings: list[str] = []
        if self._models[0].config.losses.stable_reinforce == "cispo":
            warnings.append(
                "stable_reinforce has no published formula: this server computes cispo for it, with cispo's clip "
                "thresholds and without its per-sequence terms (metric stable_reinforce_is_cispo:max)"
            )
        for model in self._models:
            if (warning := model.warning) is not None:
                several = len(self._models) > 1
                warnings.append(f"{model.config.served_names[0]}: {warning}" if several else warning)
        return "; ".join(warnings) or None


class Tokenizers:
    """Compares each pair of base models once, when a session uses both."""

    def __init__(self, served: Served, sessions: Sessions) -> None:
        self._served = served
        self._sessions = sessions
        self._shared: dict[tuple[int, int], Shared | None] = {}

    async def note(self, session_id: str, model: ServedModel, *, trains: bool) -> str | None:
        """The sentence for a session that begins to sample from `model`, or to train it, if there is something to
        say."""
        if len(self._served) == 1:
            return None
        trained, sampled = await self._sessions.base_models(session_id)
        for name in sorted(sampled if trains else trained):
            other = self._served.of(name)
            shared = None if other is model else await self._compared(model, other)
            if shared is not None and shared.same < shared.ids:
                return _tokenizers_differ(model, other, shared) if trains else _tokenizers_differ(other, model, shared)
        return None

    async def _compared(self, one: ServedModel, other: ServedModel) -> Shared | None:
        first, second = sorted((one.config, other.config), key=lambda config: config.role.number)
        pair = (first.role.number, second.role.number)
        if pair not in self._shared:
            files = [config.tokenizer_id or config.base_model_path for config in (first, second)]
            self._shared[pair] = await asyncio.to_thread(shared_ids, *files)
        return self._shared[pair]


def _tokenizers_differ(trained: ServedModel, sampled: ServedModel, shared: Shared) -> str:
    return (
        f"this session trains {trained.name!a} and samples from {sampled.name!a}, whose tokenizers differ: "
        f"{shared.same} of {shared.ids} token ids mean the same in both, and no other id may go from one to the other"
    )
