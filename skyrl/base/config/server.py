"""The configuration of a server: its keys (`skyrl.base.config.keys`), which of them go together, and whether its base
model sees pictures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
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
    def _go_together(self) -> ServerConfig:
        for sentence in chain(_of_serving(self), _of_training(self)):
            raise ValueError(sentence)  # the first one
        return self


def _of_serving(config: ServerConfig) -> Iterator[str]:
    """Why keys of gateways, addresses and API processes do not go together."""
    modes, is_remote = config.modes, config.inference_host not in LOOPBACK
    if not config.base_models:  # each of several is checked by itself
        if modes.shares_inference and (config.inference_api_key is None or config.database_url is None):
            yield (
                "backend 'none' is a sampling-only gateway: give --external-inference-url; or give database_url and "
                "inference_api_key of a server that trains, whose vLLMs it then uses"
            )
        if config.backend == "none" and config.base_model is None:
            yield "backend 'none' needs --base-model: the name that the upstream serves"
    if config.inference_host in WILDCARDS:
        yield (
            f"inference_host: {config.inference_host!r} is no address that gateways could use: give one of this "
            "machine's own"
        )
    if is_remote and config.full_finetuning:
        yield f"inference_host: {NO_GATEWAYS}: leave it out"
    if is_remote and modes.manages_inference and config.inference_api_key is None:
        yield (
            f"inference_host: {config.inference_host!r} can be reached from elsewhere, for gateways: give them and "
            "this server the same inference_api_key"
        )
    if is_remote and not modes.forwards:
        yield "inference_host: with trainer.placement.colocate_all, gateways cannot sample: leave out one of the two"
    if config.api_processes > 1 and not config.database.startswith("postgresql"):
        yield (
            f"api_processes={config.api_processes} needs PostgreSQL, where processes hear of each other's results: "
            "give --database-url postgresql://..."
        )
    if config.api_keys == "open" and not config.allow_remote and config.host not in LOOPBACK:
        yield (
            f"host {config.host!r} can be reached from elsewhere, and any API key is accepted: give --api-keys "
            f"managed, or --allow-remote if that is meant, or one of {', '.join(LOOPBACK)}"
        )


def _of_training(config: ServerConfig) -> Iterator[str]:
    """Why keys of trainer, vLLMs and Ray do not go together."""
    modes, trainer, inference = config.modes, config.backend_config.trainer, config.backend_config.inference
    full = config.full_finetuning
    if config.ray is not None and not modes.forwards:
        yield (
            "trainer.placement.colocate_all: trainer and vLLM take turns on one device of this machine, and Ray "
            "places them apart: leave out colocate_all, or ray_address and the number of ranks"
        )
    if config.ray is not None and config.backend == "none":
        yield "ray_address: backend 'none' runs neither vLLM nor a trainer: leave it out"
    if trainer.placement.expert_parallel and full:
        yield (
            "trainer.placement.expert_parallel: with trainer.full_finetuning ranks divide every parameter: leave out "
            "one of the two"
        )
    if trainer.placement.expert_parallel and (config.ray is None or not modes.trains):
        yield (
            "trainer.placement.expert_parallel: experts are divided over the trainer's ranks: set "
            "trainer.placement.policy_num_gpus_per_node or policy_num_cpu_ranks to 2 or more, or leave it out"
        )
    if trainer.context_parallel_tokens is not None and full:
        yield (
            "trainer.context_parallel_tokens: with trainer.full_finetuning no sequence is divided: leave out one of "
            "the two"
        )
    if modes.manages_inference and not modes.forwards and config.routed:
        yield (
            f"generator.inference_engine.num_engines: {inference.num_engines} vLLMs, but with "
            "trainer.placement.colocate_all the trainer takes turns with one vLLM: leave out one of the two keys"
        )
    if trainer.keep_quantized and full:
        yield (
            "trainer.keep_quantized: with trainer.full_finetuning weights change, and quantized ones cannot: leave out "
            "one of the two"
        )
    if trainer.cuda_graphs and full:
        yield (
            "trainer.cuda_graphs: with trainer.full_finetuning layers do not run as graphs: leave out one of the two"
        )
    if full and not modes.trains:
        yield f"trainer.full_finetuning: {NO_GATEWAYS}: leave it out beside backend 'none'"
    if full and not modes.manages_inference:
        yield (
            "trainer.full_finetuning: new weights can be put only into vLLMs that this server runs: leave out "
            "external_inference_url"
        )
    if full and not modes.forwards:
        yield (
            "trainer.full_finetuning: trainer and vLLM each hold all weights, and cannot take turns on one device: "
            "leave out trainer.placement.colocate_all"
        )
    if full and config.inference_api_key is not None:
        yield f"inference_api_key: {NO_GATEWAYS}: leave it out"
    if config.weights_travel and config.ray != "local" and config.checkpoint_store is None:
        yield (
            f"checkpoint_store: weights travel by it to the nodes of the Ray cluster ({config.ray}), and the "
            "default is on this machine's disk: give s3://bucket/prefix, gs://..., az://..., or file:///directory "
            "that every node sees under the same path"
        )
    if inference.ports and inference.ports[-1] > LAST_PORT:
        yield (
            f"generator.inference_engine.port: the last of {inference.num_engines} vLLMs would listen at "
            f"{inference.ports[-1]}, and {LAST_PORT} is the last port"
        )


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
