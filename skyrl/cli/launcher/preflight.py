"""The checks of `skyrl serve` before it starts any process: the base model and its tokenizer, vLLM, the GPUs, vLLM's
port, and Ray.

Each check raises ConfigError with a sentence that names the option, its value and what to give instead. Imports neither
torch nor vLLM. Whether a model can be trained or served is only known when the engine and vLLM load it.

Of a Ray cluster of this machine alone, it is checked whether the cluster has what vLLMs and trainers ask for; no
cluster is asked. Of the tokenizer's files the log says which tokens the model has no row for, which files transformers
reads otherwise than they say, and which warning of transformers is none. No tokenizer is imported: where the files look
wrong, a process compares two readings of them.
"""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from skyrl.base.config.server import ConfigError, ServerConfig
from skyrl.base.model_files import json_of, model_config, tokens_of, whole_config
from skyrl.cli.launcher.memory_estimate import check_memory
from skyrl.cli.launcher.model_location import check_model
from skyrl.inference.engine_kinds import Vllm
from skyrl.inference.features import check_vllm, vllm_version
from skyrl.inference.model_options import host_memory_warning
from skyrl.inference.vllm_command import context_sentence, cuda_devices
from skyrl.inference.vllm_plugin.protocol import TESTED_VERSIONS
from skyrl.runtime.processes.ports import LOOPBACK, check_free
from skyrl.runtime.ray_cluster.capacity import Bundle, NodeCapacity, missing, rank_places
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
    bundle = Vllm(config, "").bundle(cuda=bool(devices))
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


COMPARING_S = 120.0
_PIECES = {"LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer", "CamembertTokenizer", "XLMRobertaTokenizer"}
"""Classes that read a tokenizer as SentencePiece's, whatever its file says."""
_MISTRALS = {"mistral", "mistral3", "voxtral", "ministral", "pixtral"}
_LARGE = 100_000
"""Tokens from which transformers looks for Mistral's pattern."""


def log_notes(base_model: str) -> None:
    """Log a sentence for each finding. `base_model`: a directory, or a name of the hub."""
    for note in notes_on(base_model):
        logger.warning("%s", note)


def notes_on(base_model: str) -> Iterator[str]:
    tokens = tokens_of(base_model)
    if tokens is None:
        return
    config = whole_config(base_model)
    rows = model_config(base_model).get("vocab_size")
    beyond = {} if not isinstance(rows, int) else {number: text for number, text in tokens.items() if number >= rows}
    if beyond and "vision_config" not in config:
        first = min(beyond)
        some = "1 token" if len(beyond) == 1 else f"{len(beyond):,} tokens"
        yield (
            f"the tokenizer of {base_model} has {some} beyond the model's {rows:,} rows ({first}, "
            f"{beyond[first]!r}): requests that hold one are refused"
        )
    named = str(json_of(base_model, "tokenizer_config.json").get("tokenizer_class", ""))
    suspect = named.removesuffix("Fast") in _PIECES and _is_byte_level(json_of(base_model, "tokenizer.json"))
    if suspect and (read := _read_otherwise(base_model)) is not None:
        yield (
            f"tokenizer_config.json of {base_model} says tokenizer_class: {named}, with which transformers reads its "
            f"tokenizer.json wrongly ({read}): chats, and clients that load it, get wrong tokens and texts; set "
            'tokenizer_class to "PreTrainedTokenizerFast" there'
        )
    if Path(base_model).is_dir() and len(tokens) > _LARGE and _is_taken_for_mistrals(config):
        yield (
            f'transformers may warn of "an incorrect regex pattern" of {base_model}: the pattern is Mistral\'s, and '
            "this model is none of theirs; the warning ends with a transformers_version in its config.json"
        )


def _is_taken_for_mistrals(config: dict[str, Any]) -> bool:
    return bool(config) and not config.get("transformers_version") and config.get("model_type") not in _MISTRALS


def _is_byte_level(tokenizer: dict[str, Any]) -> bool:
    decoder = tokenizer.get("decoder") or {}
    return any(step.get("type") == "ByteLevel" for step in (decoder, *decoder.get("decoders", ())))


def _read_otherwise(base_model: str) -> str | None:
    """What transformers makes of a text, where that is not what tokenizer.json makes of it."""
    command = [sys.executable, "-m", "skyrl.trainer.tools.tokenizer_readings", base_model]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPARING_S, check=False)
    except subprocess.TimeoutExpired:
        return None
    return done.stdout.strip() or None
