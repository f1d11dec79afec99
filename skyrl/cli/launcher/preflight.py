"""The checks of `skyrl serve` before it starts any process: the base model, vLLM, the GPUs, vLLM's port, and Ray.

Each check raises ConfigError with a sentence that names the option, its value and what to give instead. Imports neither
torch nor vLLM. Whether a model can be trained or served is only known when the engine and vLLM load it.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from skyrl.base.config.server import ConfigError, ServerConfig
from skyrl.base.model_files import model_config
from skyrl.cli.launcher.memory_estimate import check_memory
from skyrl.cli.launcher.model_location import check_model
from skyrl.cli.launcher.ray_room import check_room_of_ranks, check_room_of_vllms, check_shared_gpus
from skyrl.cli.launcher.tokenizer_notes import log_notes
from skyrl.inference.features import check_vllm, vllm_version
from skyrl.inference.model_options import host_memory_warning
from skyrl.inference.vllm_command import context_sentence, cuda_devices
from skyrl.inference.vllm_plugin.protocol import TESTED_VERSIONS
from skyrl.runtime.processes.ports import LOOPBACK, check_free
from skyrl.runtime.ray_cluster.connection import NoCluster, ask, check_installed, find_address

logger = logging.getLogger(__name__)


def check_base_model(config: ServerConfig) -> bool:
    """As `check_model`, for the base model of a server."""
    try:
        return check_model(config.base_model_path)
    except (OSError, RuntimeError) as error:  # a path that is too long, the home of an unknown user
        raise ConfigError(f"base_model: {config.base_model!r} cannot be read: {error}") from error
    except ConfigError as error:
        raise ConfigError(f"base_model: {error}") from error


def check_gpus(config: ServerConfig, devices: Sequence[str]) -> None:
    """Raises ConfigError when CUDA_VISIBLE_DEVICES names a GPU that does not exist, or when there are too few GPUs."""
    gpus = [entry for entry in os.listdir("/dev") if re.fullmatch(r"nvidia\d+", entry)]
    missing = [device for device in devices if device.strip().isdigit() and int(device) >= len(gpus)]
    if missing and not Path("/dev/dxg").exists():  # WSL has GPUs without such files
        raise ConfigError(
            f"CUDA_VISIBLE_DEVICES: names GPU {missing[0].strip()}, and this machine has {len(gpus)}, counted "
            "from 0; leave it unset for all of them, or set it to -1 for none"
        )
    inference = config.backend_config.inference
    wanted = inference.tensor_parallel_size
    if devices and wanted > len(devices):
        raise ConfigError(
            f"generator.inference_engine.tensor_parallel_size: {wanted} needs as many GPUs, and there are "
            f"{len(devices)}"
        )
    total = inference.num_engines * wanted
    if devices and total > len(devices) and config.modes.manages_inference:
        raise ConfigError(
            f"generator.inference_engine.num_engines: {inference.num_engines} vLLMs with tensor_parallel_size {wanted} "
            f"need {total} GPUs, and there are {len(devices)}"
        )


def check_inference_port(config: ServerConfig) -> None:
    """Raises ConfigError when a configured port of vLLM is in use."""
    for port in config.backend_config.inference.ports or ():
        _check_port(config, port)


def _check_port(config: ServerConfig, port: int) -> None:
    if port == config.port:
        raise ConfigError(f"generator.inference_engine.port: {port} is this server's own port; vLLM needs another one")
    try:
        check_free(port)
    except OSError as error:
        raise taken_port(port, error) from error


def taken_port(port: int, error: OSError) -> ConfigError:
    return ConfigError(f"generator.inference_engine.port: vLLM cannot listen on {LOOPBACK}:{port} ({error.strerror})")


@dataclass(frozen=True)
class Findings:
    """The results of the checks. `devices` are the GPUs of this machine. `offline`: the model's files are on this
    machine, and no process asks the model hub. `vllm_tested`: the version of vLLM was tested with skyrl. `ray_address`
    is HOST:PORT of a Ray cluster that runs already. `cuda`: vLLM runs on GPUs, of this machine or of that cluster."""

    devices: list[str]
    offline: bool = False
    vllm_tested: bool = True
    ray_address: str | None = None
    cuda: bool = False


def check_each(base_models: Sequence[ServerConfig]) -> list[Findings]:
    """Run all checks for each base model of a server. Raises ConfigError; where the server has several, the message
    begins with the name of the base model."""
    findings: list[Findings] = []
    for part in base_models:
        try:
            findings.append(check(part))
        except ConfigError as error:
            if not part.role.name:
                raise
            raise ConfigError(f"{part.served_names[0]}: {error}") from error
    if len(base_models) > 1:
        if base_models[0].ray == "local":
            check_shared_gpus(base_models, findings[0].devices)
        check_memory([(part, found.devices) for part, found in zip(base_models, findings, strict=True)])
    return findings


def devices_of(config: ServerConfig) -> list[str]:
    """The GPUs of this machine that a base model may use. Raises ConfigError when `devices` names one that the server
    may not use."""
    visible = cuda_devices()
    if config.devices is None or not visible:
        return visible
    if missing := [device for device in config.devices if device.isdigit() and device not in visible]:
        raise ConfigError(f"devices: GPU {missing[0]} is none of this server's, which are {', '.join(visible)}")
    return list(config.devices)


def check(config: ServerConfig) -> Findings:
    """Run all checks that this configuration needs. Raises ConfigError."""
    devices = devices_of(config)
    found = Findings(devices, cuda=bool(devices))
    if not (config.modes.trains or config.modes.manages_inference):
        return found
    if config.ray is None:
        check_gpus(config, devices)
    found = replace(found, offline=check_base_model(config))
    log_notes(config.tokenizer_id or config.base_model_path)
    if config.ray is not None:
        found = _check_ray(config, config.ray, found)
        if config.ray == "local":
            check_shared_gpus((config,), devices)
            if config.modes.trains:
                check_room_of_ranks(config, devices)
            if config.modes.manages_inference:
                check_room_of_vllms(config, devices)
    if not config.modes.manages_inference:
        return found
    _warn_of_host_memory(config)
    if sentence := context_sentence(config, cuda=found.cuda):
        logger.info("%s%s", f"{config.served_names[0]}: " if config.role.name else "", sentence)
    if config.ray in (None, "local"):  # else each node checks its own vLLM
        found = replace(found, vllm_tested=check_vllm(cuda=found.cuda, colocated=not config.modes.forwards))
        if config.full_finetuning and not found.vllm_tested:
            raise ConfigError(
                "trainer.full_finetuning: needs skyrl's changes to vLLM, which are for vLLM "
                f"{' or '.join(f'{prefix}*' for prefix in TESTED_VERSIONS)}, and {vllm_version()} is installed"
            )
        check_inference_port(config)
        replicas = config.backend_config.inference.num_engines
        if not devices and replicas > 1:
            logger.warning(
                "num_engines: %d vLLMs share this machine's %d cores: without GPUs they are not faster than one",
                replicas,
                os.cpu_count() or 1,
            )
    return found


def check_placed_vllms(config: ServerConfig, ray: str) -> Findings:
    """The checks for vLLMs alone on the Ray cluster `ray`, as in `ray_address`. Raises ConfigError."""
    devices = cuda_devices()
    found = Findings(devices, cuda=bool(devices), offline=check_base_model(config))
    _warn_of_host_memory(config)
    found = _check_ray(config, ray, found)
    if ray != "local":
        return found
    check_room_of_vllms(config, devices)
    return replace(found, vllm_tested=check_vllm(cuda=found.cuda, colocated=False))


def _warn_of_host_memory(config: ServerConfig) -> None:
    if (warning := host_memory_warning(config, model_config(config.base_model_path))) is not None:
        logger.warning("%s", warning)


def _check_ray(config: ServerConfig, ray: str, found: Findings) -> Findings:
    """The cluster's address, and whether it has GPUs; nothing new for a cluster that is still to be started. Raises
    ConfigError when the cluster cannot be used."""
    check_installed()
    if ray == "local":
        return found
    try:
        address = find_address(ray)
        facts = ask(address)
    except NoCluster as error:
        raise ConfigError(str(error)) from error
    nodes = "1 node" if facts.nodes == 1 else f"{facts.nodes} nodes"
    logger.info("Ray cluster at %s: %s, %g GPUs", address, nodes, facts.gpus)
    wants_gpus = config.backend_config.inference.tensor_parallel_size > 1
    return replace(found, ray_address=address, cuda=facts.gpus > 0 or wants_gpus)
