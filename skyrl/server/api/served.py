"""What this server serves: its base models, by their names, each with what an API process has for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from skyrl.base.config.server import ServerConfig
from skyrl.base.config.several import ByName
from skyrl.base.model_files import FROZEN_WARNING, is_mixture
from skyrl.base.wire.errors import RequestError
from skyrl.chat.openai.service import OpenAIService
from skyrl.inference.adapter_host import AdapterHost
from skyrl.runtime.processes.runtime import Runtime
from skyrl.sampling.base_model import BaseModelSampling
from skyrl.server.api.readiness import EngineWatch
from skyrl.server.api.ready_reasons import ReadyReasons


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
