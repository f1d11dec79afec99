"""The checks of `skyrl serve` for a Ray cluster of this machine alone: whether it has what vLLMs and trainers ask for.

Each raises ConfigError with a sentence that names the option and what to give instead. Asks no cluster.
"""

from __future__ import annotations

from collections.abc import Sequence

from skyrl.base.config.server import ConfigError, ServerConfig
from skyrl.inference.engine_kinds import KINDS, VLLM
from skyrl.runtime.ray_cluster.capacity import Bundle, NodeCapacity, missing, rank_places

_GIVEN_BY_RAY = ("CPU", "memory", "object_store_memory")
"""Resources of this machine's own cluster besides GPUs. It has as many CPUs as all parts ask for."""


def check_shared_gpus(base_models: Sequence[ServerConfig], devices: Sequence[str]) -> None:
    """Raises ConfigError when Ray cannot give each vLLM and each rank of the trainers GPUs of this machine."""
    vllms = sum(_gpus_of_vllms(config) for config in base_models)
    ranks = sum(_gpus_of_ranks(config) for config in base_models)
    if devices and vllms + ranks > len(devices):
        needs = "the trainer needs" if len(base_models) == 1 else "the trainers need"
        raise ConfigError(
            f"ray_address: on a Ray cluster no GPU is shared: the vLLMs need {vllms} and {needs} {ranks}, "
            f"and this machine has {len(devices)}; leave out ray_address to share GPUs, or use fewer"
        )


def _gpus_of_vllms(config: ServerConfig) -> int:
    inference = config.backend_config.inference
    return inference.num_engines * inference.tensor_parallel_size if config.modes.manages_inference else 0


def _gpus_of_ranks(config: ServerConfig) -> int:
    placement = config.backend_config.trainer.placement
    return placement.ranks if config.modes.trains and placement.policy_num_cpu_ranks is None else 0


def check_room_of_ranks(config: ServerConfig, devices: Sequence[str]) -> None:
    """Raises ConfigError when this machine lacks what the trainer's ranks ask Ray for. For a cluster of this machine
    alone: no node that has it will join."""
    lack = _lack(rank_places(config, cluster_has_gpus=bool(devices)).bundles, devices)
    if not lack:
        return
    if any(name != "GPU" for name in _asked(config.backend_config.trainer.placement.policy_resources)):
        raise _never_placed("trainer.placement.policy_resources", lack, "leave the key out")
    raise _never_placed(
        "trainer.placement.policy_num_gpus_per_node", lack, "set trainer.placement.policy_num_cpu_ranks in its place"
    )


def check_room_of_vllms(config: ServerConfig, devices: Sequence[str]) -> None:
    """The same for the vLLMs."""
    inference = config.backend_config.inference
    bundle = KINDS[VLLM](config, "").bundle(cuda=bool(devices))
    if lack := _lack((bundle,) * inference.num_engines, devices):
        key = "resources" if _asked(inference.resources) else "tensor_parallel_size"
        raise _never_placed(f"generator.inference_engine.{key}", lack, "lower it or leave it out")


def _lack(bundles: Sequence[Bundle], devices: Sequence[str]) -> str:
    has = {"GPU": float(len(devices))}
    return missing([_asked(bundle) for bundle in bundles], [NodeCapacity("", "this machine", has, has)])


def _asked(bundle: Bundle) -> Bundle:
    """Without what Ray gives every node. It names some resources itself, with a colon: `accelerator_type:H100`."""
    return {name: amount for name, amount in bundle.items() if name not in _GIVEN_BY_RAY and ":" not in name}


def _never_placed(key: str, lack: str, advice: str) -> ConfigError:
    return ConfigError(
        f"{key}: {lack}, and no other node will join, because the Ray cluster is this machine alone: {advice}, or give "
        "the ray_address of a cluster that has it"
    )
