"""The configuration of a server: its keys (`skyrl.base.config.keys`), which of them go together, and whether its base
model sees pictures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from pydantic import model_validator

from skyrl.base.config.backend import LAST_PORT
from skyrl.base.config.backend import ConfigError as ConfigError
from skyrl.base.config.keys import LOOPBACK, ServerKeys
from skyrl.base.pictures.vision import NoVision, VisionConfig

WILDCARDS = ("", "0.0.0.0", "::", "*")
NO_GATEWAYS = (
    "with trainer.full_finetuning no gateway can sample, because it would not know which weights vLLM has; give the "
    "server that trains more api_processes"
)
"""docs/decisions/full-finetuning.md has what gateways would need."""


class ServerConfig(ServerKeys):
    """A configuration that a server can run with. Raises pydantic's ValidationError for the first keys that do not go
    together."""

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """The configuration with exactly these values: it reads no environment. Raises as the class."""

        class _Given(cls):
            @classmethod
            def settings_customise_sources(cls, settings_cls, init_settings, **_: Any):  # type: ignore[override]
                return (init_settings,)

        given = _Given(**values)
        return cls.model_construct(_fields_set=given.model_fields_set, **dict(given))

    @model_validator(mode="after")
    def _gateway_has_upstream(self) -> ServerConfig:
        if self.base_models:  # each is checked by itself
            return self
        if self.modes.shares_inference and (self.inference_api_key is None or self.database_url is None):
            raise ValueError(
                "backend 'none' is a sampling-only gateway: give --external-inference-url; or give database_url and "
                "inference_api_key of a server that trains, whose vLLMs it then uses"
            )
        if self.backend == "none" and self.base_model is None:
            raise ValueError("backend 'none' needs --base-model: the name that the upstream serves")
        return self

    @model_validator(mode="after")
    def _gateways_have_a_key(self) -> ServerConfig:
        if self.inference_host in WILDCARDS:
            raise ValueError(
                f"inference_host: {self.inference_host!r} is no address that gateways could use: give one of this "
                "machine's own"
            )
        if self.inference_host not in LOOPBACK and self.full_finetuning:
            raise ValueError(f"inference_host: {NO_GATEWAYS}: leave it out")
        if self.inference_host not in LOOPBACK and self.modes.manages_inference and self.inference_api_key is None:
            raise ValueError(
                f"inference_host: {self.inference_host!r} can be reached from elsewhere, for gateways: give them and "
                "this server the same inference_api_key"
            )
        if self.inference_host not in LOOPBACK and not self.modes.forwards:
            raise ValueError(
                "inference_host: with trainer.placement.colocate_all, gateways cannot sample: leave out one of the two"
            )
        return self

    @model_validator(mode="after")
    def _several_processes_need_postgresql(self) -> ServerConfig:
        if self.api_processes > 1 and not self.database.startswith("postgresql"):
            raise ValueError(
                f"api_processes={self.api_processes} needs PostgreSQL, where processes hear of each other's results: "
                "give --database-url postgresql://..."
            )
        return self

    @model_validator(mode="after")
    def _open_keys_stay_local(self) -> ServerConfig:
        if self.api_keys == "open" and not self.allow_remote and self.host not in LOOPBACK:
            raise ValueError(
                f"host {self.host!r} can be reached from elsewhere, and any API key is accepted: give --api-keys "
                f"managed, or --allow-remote if that is meant, or one of {', '.join(LOOPBACK)}"
            )
        return self

    @model_validator(mode="after")
    def _ray_takes_no_turns(self) -> ServerConfig:
        if self.ray is not None and not self.modes.forwards:
            raise ValueError(
                "trainer.placement.colocate_all: trainer and vLLM take turns on one device of this machine, and Ray "
                "places them apart: leave out colocate_all, or ray_address and the number of ranks"
            )
        if self.ray is not None and self.backend == "none":
            raise ValueError("ray_address: backend 'none' runs neither vLLM nor a trainer: leave it out")
        return self

    @model_validator(mode="after")
    def _ranks_hold_experts(self) -> ServerConfig:
        if not self.backend_config.trainer.placement.expert_parallel:
            return self
        key = "trainer.placement.expert_parallel"
        if self.full_finetuning:
            raise ValueError(
                f"{key}: with trainer.full_finetuning ranks divide every parameter: leave out one of the two"
            )
        if self.ray is None or not self.modes.trains:
            raise ValueError(
                f"{key}: experts are divided over the trainer's ranks: set trainer.placement.policy_num_gpus_per_node "
                "or policy_num_cpu_ranks to 2 or more, or leave it out"
            )
        return self

    @model_validator(mode="after")
    def _adapters_divide_sequences(self) -> ServerConfig:
        if self.backend_config.trainer.context_parallel_tokens is not None and self.full_finetuning:
            raise ValueError(
                "trainer.context_parallel_tokens: with trainer.full_finetuning no sequence is divided: leave out one "
                "of the two"
            )
        return self

    @model_validator(mode="after")
    def _one_vllm_takes_turns(self) -> ServerConfig:
        if self.modes.manages_inference and not self.modes.forwards and self.routed:
            raise ValueError(
                f"generator.inference_engine.num_engines: {self.backend_config.inference.num_engines} vLLMs, but with "
                "trainer.placement.colocate_all the trainer takes turns with one vLLM: leave out one of the two keys"
            )
        return self

    @model_validator(mode="after")
    def _adapters_keep_quantized(self) -> ServerConfig:
        if not self.backend_config.trainer.keep_quantized:
            return self
        key = "trainer.keep_quantized"
        if self.full_finetuning:
            raise ValueError(
                f"{key}: with trainer.full_finetuning weights change, and quantized ones cannot: leave out one of "
                "the two"
            )
        return self

    @model_validator(mode="after")
    def _full_weights_reach_vllm(self) -> ServerConfig:
        if not self.full_finetuning:
            return self
        key = "trainer.full_finetuning"
        if not self.modes.trains:
            raise ValueError(f"{key}: {NO_GATEWAYS}: leave it out beside backend 'none'")
        if not self.modes.manages_inference:
            raise ValueError(
                f"{key}: new weights can be put only into vLLMs that this server runs: leave out external_inference_url"
            )
        if not self.modes.forwards:
            raise ValueError(
                f"{key}: trainer and vLLM each hold all weights, and cannot take turns on one device: leave out "
                "trainer.placement.colocate_all"
            )
        if self.inference_api_key is not None:
            raise ValueError(f"inference_api_key: {NO_GATEWAYS}: leave it out")
        return self

    @model_validator(mode="after")
    def _nodes_share_a_store(self) -> ServerConfig:
        if self.weights_travel and self.ray != "local" and self.checkpoint_store is None:
            raise ValueError(
                f"checkpoint_store: weights travel by it to the nodes of the Ray cluster ({self.ray}), and the "
                "default is on this machine's disk: give s3://bucket/prefix, gs://..., az://..., or file:///directory "
                "that every node sees under the same path"
            )
        return self

    @model_validator(mode="after")
    def _ports_exist(self) -> ServerConfig:
        inference = self.backend_config.inference
        if inference.ports and inference.ports[-1] > LAST_PORT:
            raise ValueError(
                f"generator.inference_engine.port: the last of {inference.num_engines} vLLMs would listen at "
                f"{inference.ports[-1]}, and {LAST_PORT} is the last port"
            )
        return self


def vision_of(config: ServerConfig) -> VisionConfig | NoVision:
    """NoVision if neither the trainer nor the inference servers take pictures: because of the base model, or because
    the operator has switched them off. Servers that skyrl does not run are expected to see. Reads small files of the
    base model."""
    if config.modes.manages_inference and config.backend_config.inference.engine_options.get("language_model_only"):
        return NoVision("the operator has switched images off (engine_init_kwargs.language_model_only)")
    try:
        return VisionConfig.of(config.base_model_path)
    except NoVision as blind:
        return blind


def takes_pictures(config: ServerConfig) -> bool:
    return isinstance(vision_of(config), VisionConfig)
