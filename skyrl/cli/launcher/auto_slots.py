"""`max_loras = "auto"`: puts a number in its place, before a server starts anything.

It is the number that `skyrl capacity` has found for the same base model, configuration and machine; else an estimate
by the sizes of the base model. Starts nothing and measures nothing, so that it takes a moment.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from skyrl.base.config.backend import DEFAULT_SLOTS, MAX_LORAS, ONLY_SERVE, parse_backend_config
from skyrl.base.config.server import ConfigError, ServerConfig
from skyrl.base.config.several import base_models_of
from skyrl.base.model_files import model_config
from skyrl.cli.launcher import kept_capacity
from skyrl.cli.launcher.memory_estimate import gb, need_of, server_bytes, size_of
from skyrl.cli.launcher.room import CACHE_SHARE, MOST_SLOTS, Room, slots_that_fit
from skyrl.inference.model_options import adapter_features, room_bytes
from skyrl.inference.vllm_command import cuda_devices, inference_devices
from skyrl.runtime.processes.gpus import gpu_memory
from skyrl.runtime.processes.host_resources import free_host_bytes

SHRUNK = 0.9
"""With less than this part of the memory that was free at the measurement, its number no longer counts."""
GPU_BYTES = 2
"""Of a number of a base model or an adapter in vLLM, on a GPU."""


@dataclass(frozen=True)
class Slots:
    """A number for `max_loras`, and where it comes from."""

    number: int
    why: str


def with_slots(config: ServerConfig) -> tuple[ServerConfig, str]:
    """The configuration with a number in place of "auto", and a sentence about it; itself and an empty sentence where a
    number is given. Raises ConfigError where "auto" cannot be used."""
    parts = base_models_of(config)
    if all(part.backend_config.lora.max_loras != "auto" for part in parts):
        return config, ""
    if not config.base_models and not config.modes.manages_inference:  # its vLLMs are others': the key has no effect
        return config, ""
    if config.base_models or config.ray is not None or config.full_finetuning:
        raise ConfigError(f'{MAX_LORAS}: "auto" {ONLY_SERVE}')
    found = _slots(with_number(config, 1))
    return with_number(config, found.number), f"{MAX_LORAS}: auto is {found.number}: {found.why}"


def with_number(config: ServerConfig, number: int) -> ServerConfig:
    """The configuration with this `max_loras`."""
    backend = kept_capacity.of_backend(config) | {MAX_LORAS: number}
    if (port := config.backend_config.inference.port) is not None:
        backend[kept_capacity.PORT] = port
    return config.model_copy(update={"backend_config": parse_backend_config(backend)})


def _slots(config: ServerConfig) -> Slots:
    most, cuda = most_slots(config), bool(cuda_devices())
    if not Path("/proc/meminfo").exists():
        return Slots(min(DEFAULT_SLOTS, most), "the default, as this system does not tell its memory")
    kept, available = kept_capacity.read(config), free_host_bytes()
    if kept is not None and (cuda or available >= SHRUNK * kept.available):
        return Slots(min(kept.slots, most), f"skyrl capacity has measured it on {kept.measured_at}")
    estimated = _on_gpu(config, most) if cuda else _on_cpu(config, available, most)
    if kept is None:
        return Slots(estimated.number, f"{estimated.why}; skyrl capacity has not measured this model here")
    why = f"{gb(available)} are free, and {gb(kept.available)} were at the measurement of {kept.measured_at}"
    return Slots(estimated.number, f"{estimated.why}; {why}")


def most_slots(config: ServerConfig) -> int:
    """The most slots that other keys allow."""
    lora = config.backend_config.lora
    given = lora.max_cpu_loras if "max_cpu_loras" in lora.model_fields_set else MOST_SLOTS
    return min(given, config.backend_config.inference.max_num_seqs, MOST_SLOTS)


def _on_cpu(config: ServerConfig, available: float, most: int) -> Slots:
    size = size_of(config.base_model_path)
    need = None if size is None else need_of(config, size)
    if need is None or need.passing is None:
        return Slots(min(DEFAULT_SLOTS, most), "the default, as config.json does not tell how large an adapter is")
    passing, _ = need.passing.worst(max(0.0, available - need.total))
    room = Room(
        available=available,
        ready=need.total + server_bytes(config),
        passing=passing - need.passing.in_training,
        sampling=need.use.cache + need.use.computing(need.use.batch, need.use.sequences),
        adapter=need.passing.in_training,
        slot=need.use.slot,
        kept=need.use.adapter,
        engines=need.engines,
    )
    number = slots_that_fit(room, need.use.kept, most)
    of_each = (
        f"{room.adapter / 1e6:,.1f} MB of an adapter in training, {(room.slot + room.kept) / 1e6:,.1f} of one in vLLM"
    )
    return Slots(number, f"estimated by {gb(available)} of free memory, {of_each}")


def _on_gpu(config: ServerConfig, most: int) -> Slots:
    """Slots take a part of what a vLLM has beside its weights."""
    model, size = model_config(config.base_model_path), size_of(config.base_model_path)
    lora, inference = config.backend_config.lora, config.backend_config.inference
    parallel = inference.tensor_parallel_size
    slot = GPU_BYTES * lora.max_lora_rank * adapter_features(model) / parallel + room_bytes(config, model)
    memory = gpu_memory()
    devices = inference_devices(config, cuda_devices(), has_trainer=config.modes.trains)[0]
    if size is None or not adapter_features(model) or any(device not in memory for device in devices):
        return Slots(min(DEFAULT_SLOTS, most), "the default, as the sizes of the model or of its GPUs are not known")
    share = inference.gpu_memory_utilization * min(memory[device].total for device in devices)
    beside = max(0.0, share - GPU_BYTES * size.parameters / parallel)
    number = max(1, min(most, int(CACHE_SHARE * beside // slot)))
    return Slots(number, f"estimated: {gb(number * slot)} of the {gb(beside)} that a vLLM has beside its weights")
