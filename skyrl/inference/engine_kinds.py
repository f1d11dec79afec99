"""The kinds of inference engines that skyrl runs: what a kind's servers need, how they are started, probed and used.

Whoever starts, watches or uses a server asks the server's kind. A kind is sent to other machines: it holds settings,
and looks at the machine only in `check` and `spec`. `RolloutVllm` is vLLM with a sidecar that serves clients, on a node
of a Ray cluster: the engines of `skyrl rollout`.
"""

from __future__ import annotations

import ipaddress
import json
import logging
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from skyrl.base.config.server import ConfigError, ServerConfig
from skyrl.base.model_files import model_config
from skyrl.inference.adapter_host import AdapterHost
from skyrl.inference.features import check_vllm, is_tested
from skyrl.inference.metrics import AdapterMetrics
from skyrl.inference.model_options import longest_step, memory_hint
from skyrl.inference.placement import ServerSpec, Spot
from skyrl.inference.remote.settings import CACHE, PlacedSidecar, default_cache, node_environment
from skyrl.inference.replica import Addresses, Replica
from skyrl.inference.vllm_client import Probe
from skyrl.inference.vllm_command import LOGGING_CONFIG, context_length, cuda_devices, options_named, vllm_spec
from skyrl.runtime.processes.logs import vllm_logging
from skyrl.runtime.processes.ports import group_variables, interface_of
from skyrl.runtime.processes.startup import Cause, cause_of_vllm
from skyrl.storage.checkpoint_store.registry import store_url

VLLM = "vllm"
_PORT_TAKEN = re.compile(r"^OSError: \[Errno \d+\] Address already in use")
"""Python's words when vLLM binds its port or begins to listen."""


@dataclass(frozen=True)
class Vllm:
    """vLLM. With `offline` it does not ask the model hub. `tested` tells whether the installed version was tested; None
    means that each machine finds out for itself."""

    config: ServerConfig
    key: str
    offline: bool = False
    tested: bool | None = None

    @property
    def probes(self) -> Mapping[Probe, float]:
        options = self.config.backend_config.inference
        step_s = options.step_timeout_s
        if "step_timeout_s" not in options.model_fields_set and not cuda_devices():
            step_s *= longest_step(context_length(self.config, cuda=False) or 0)
        return {"/health": options.health_timeout_s, "/is_sleeping": step_s}

    def bundle(self, *, cuda: bool) -> dict[str, float]:
        options = self.config.backend_config.inference
        gpus = {"GPU": float(options.tensor_parallel_size)} if cuda else {}
        own = {name: amount for name, amount in options.resources.items() if amount}
        return gpus | (own if options.resources else {"CPU": float(self.config.threads)})

    def check(self, *, cuda: bool) -> None:
        check_vllm(cuda=cuda, colocated=False)
        model = Path(self.config.base_model_path)
        if model.is_absolute() and not model.is_dir():
            raise ConfigError(f"base_model: there is no directory {model} on this machine")

    def spec(self, name: str, spot: Spot) -> ServerSpec:
        spec = vllm_spec(
            self.config,
            spot.port,
            self.key,
            cuda=spot.cuda,
            host=spot.host,
            directory=spot.directory,
            offline=self.offline,
            tested=is_tested() if self.tested is None else self.tested,
            log_name=f"{name}.log",
            logging_config=None if spot.directory is None else spot.directory / f"{name}-logging.json",
        )
        if self.config.weights_travel:
            spec = self._on_node(spec, name, spot.sidecar_port)
        if (file := spec.env.get(LOGGING_CONFIG)) is not None:
            Path(file).write_text(json.dumps(vllm_logging(name)))
        return spec

    def _on_node(self, spec: ServerSpec, name: str, sidecar_port: int | None) -> ServerSpec:
        """The server with what fetches weights from the checkpoint store: vLLM itself, or its sidecar."""
        fetches = {**node_environment(self.config), CACHE: str(self._cache())}
        if not self.config.full_finetuning:
            return replace(spec, env={**fetches, **spec.env})
        return self._with_sidecar(spec, name, sidecar_port, self.key, self.key, fetches)

    def _with_sidecar(
        self,
        spec: ServerSpec,
        name: str,
        port: int | None,
        admin_key: str | None,
        client_key: str | None,
        env: Mapping[str, str],
    ) -> ServerSpec:
        assert port is not None
        placed = PlacedSidecar(
            vllm_url=spec.url,
            host=spec.host,
            port=port,
            number=int(name.rpartition("-")[2]),
            base_model=self.config.base_model_path,
            max_body_bytes=self.config.max_body_bytes,
            log_level=self.config.log_level,
            log_format=self.config.log_format,
        )
        argv = (sys.executable, "-m", "skyrl.inference.remote.sidecar")
        env = {**env, **placed.environment(self.key, admin_key, client_key)}
        return replace(spec, sidecar=ServerSpec(argv, env, spec.host, port, f"sidecar-{placed.number}.log"))

    def _cache(self) -> Path:
        """Where the vLLMs of this node keep weights: as the node's operator says, or else in a directory that outlives
        a start of vLLM, whose own temporary directory does not."""
        if configured := os.environ.get(CACHE):
            return Path(configured)
        if self.config.ray == "local":
            return self.config.state_dir / "node-adapters"
        return default_cache(store_url(self.config))

    def cause(self, code: int, tail: str) -> Cause | None:
        cause = cause_of_vllm(code, tail)
        if cause is None:
            return None
        if _PORT_TAKEN.match(cause.sentence):
            configured = self.config.backend_config.inference.port is not None
            prefix = "generator.inference_engine.port: " if configured else ""
            return Cause(f"{prefix}another process has taken vLLM's port ({cause.sentence})", cause.final)
        option = options_named(self.config, cause.sentence)
        prefix = f"{option}: vLLM refuses it" if option else "vLLM cannot start"
        hint = memory_hint(self.config, model_config(self.config.base_model_path), cause.sentence)
        return Cause(f"{prefix}: {cause.sentence}{hint}", cause.final)

    def replica(self, addresses: Addresses, host: AdapterHost, metrics: AdapterMetrics) -> Replica:
        return Replica(addresses.data, addresses, self.key, host, metrics=metrics)


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RolloutVllm(Vllm):
    """`client_key` is what the sidecar's clients must send, None for nothing. `admin_key` opens all its routes."""

    client_key: str | None = None
    admin_key: str | None = None

    def spec(self, name: str, spot: Spot) -> ServerSpec:
        spec = super().spec(name, spot)
        spec = self._with_sidecar(spec, name, spot.sidecar_port, self.admin_key, self.client_key, {})
        return replace(spec, env={**spec.env, **_group_interface(spec.host)})


def _group_interface(host: str) -> dict[str, str]:
    """The variables by which vLLM joins a trainer's group over the network of its node; by default it knows loopback
    alone, where no other machine is."""
    try:
        if ipaddress.ip_address(host).is_loopback:
            return {}
    except ValueError:
        pass  # a name
    name = interface_of(host)
    if name is None:
        logger.warning("no network interface has the address %s: vLLM can join no group of another machine", host)
        return {}
    return group_variables(name)
