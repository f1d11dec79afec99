"""What this server serves: its base models, by their names, each with what an API process has for it.

`Tokenizers` tells a client that its session trains one base model and samples from another whose token ids mean
something else. Recipes send token ids of one to the other, as in distillation. The ids may be in both vocabularies:
then nothing fails, and nothing is learned. Nothing is refused here: a judge, which gets text, may have any
tokenizer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from skyrl.api.readiness import EngineWatch, ReadyReasons
from skyrl.base.config.server import ServerConfig
from skyrl.base.config.several import ByName
from skyrl.base.model_files import FROZEN_WARNING, Shared, is_mixture, shared_ids
from skyrl.base.wire.errors import RequestError
from skyrl.chat.openai.service import OpenAIService
from skyrl.inference.adapter_host import AdapterHost
from skyrl.runtime.processes.runtime import Runtime
from skyrl.sampling.base_model import BaseModelSampling
from skyrl.storage.db.sessions import Sessions


@dataclass(frozen=True)
class ServedModel:
    """One base model. `openai` is None if the engine samples."""

    runtime: Runtime
    lane: BaseModelSampling
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

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._models)

    def __len__(self) -> int:
        return len(self._models)

    def __getitem__(self, number: int) -> ServedModel:
        return self._models[number]

    def named(self, name: str, field: str = "base_model") -> ServedModel:
        """The base model that a client names. Raises RequestError naming `field` and listing the names that are
        served."""
        number = self._names.number(name)
        if number is None:
            raise RequestError(f"{name!r} is not served here; there is: {', '.join(self._names.served)}", field=field)
        return self._models[number]

    def number_of(self, stored: str) -> int:
        """The number of the base model of a stored row; 0 if it is served no more under this name."""
        return self._names.number(stored) or 0

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
        if not any(model.config.modes.trains for model in self._models):
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

    async def note_sampled(self, session_id: str, model: ServedModel) -> str | None:
        """The sentence for a session that begins to sample from `model`, if there is something to say."""
        return await self._note(session_id, model, trains=False)

    async def note_trained(self, session_id: str, model: ServedModel) -> str | None:
        """The same for a session that begins to train `model`."""
        return await self._note(session_id, model, trains=True)

    async def _note(self, session_id: str, model: ServedModel, *, trains: bool) -> str | None:
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
