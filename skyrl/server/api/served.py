"""What this server serves: base model, tokenizer and trainer, by its configuration."""

from __future__ import annotations

from pathlib import Path

from skyrl.base.config.mixtures import FROZEN_WARNING, is_mixture
from skyrl.base.config.server import ServerConfig
from skyrl.base.wire.errors import RequestError


class Served:
    """Checks requests against the configuration."""

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._is_mixture = config.modes.trains and is_mixture(config.base_model_path)

    def check_base_model(self, name: str, field: str = "base_model") -> str:
        """The name, if this server serves it. Raises RequestError naming `field` and listing the names that are
        served."""
        served = (*self._config.served_names, self._config.base_model_path)
        if name not in served:
            raise RequestError(
                f"{name!r} is not served here; there is: {', '.join(self._config.served_names)}",
                field=field,
            )
        return name

    def check_trainable(self) -> None:
        """Raises RequestError on a server without a trainer."""
        if not self._config.modes.trains:
            raise RequestError("this server only samples (backend 'none'); it has no trainer")

    def tokenizer_name(self, base_model: str) -> str:
        """The name by which clients load a tokenizer: `tokenizer_id` if configured; the model's directory if
        `base_model` is an alias; else `base_model`. Clients would look for an alias on the model hub; the directory
        works on this machine."""
        if self._config.tokenizer_id is not None:
            return self._config.tokenizer_id
        path = self._config.base_model_path
        return path if "/" not in base_model and Path(path).is_dir() else base_model

    @property
    def refuses_mlp(self) -> bool:
        """Whether adapters may not ask for `train_mlp`. False also for a model of the hub that was not on this machine
        when this process started; the trainer then refuses."""
        return self._config.backend_config.lora.train_mlp_of_mixtures == "refuse" and self._is_mixture

    def session_warning(self) -> str | None:
        """What a client should know before it trains; None if there is nothing."""
        warnings: list[str] = []
        if self._config.losses.stable_reinforce == "cispo":
            warnings.append(
                "stable_reinforce has no published formula: this server computes cispo for it, with cispo's clip "
                "thresholds and without its per-sequence terms (metric stable_reinforce_is_cispo:max)"
            )
        leaves_out = self._config.backend_config.lora.train_mlp_of_mixtures == "leave_out"
        if not self._config.full_finetuning and leaves_out and self._is_mixture:
            warnings.append(FROZEN_WARNING)
        return "; ".join(warnings) or None
