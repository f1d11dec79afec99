"""vLLM with a sidecar that serves clients, on a node of a Ray cluster: the engines of `skyrl rollout`."""

from __future__ import annotations

import ipaddress
import logging
from dataclasses import dataclass, replace

from skyrl.inference.engine_kinds import Vllm, sidecar_spec
from skyrl.inference.placement import ServerSpec, Spot
from skyrl.inference.remote.settings import PlacedSidecar
from skyrl.runtime.processes.ports import group_variables, interface_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PlaneVllm(Vllm):
    """`client_key` is what the sidecar's clients must send, None for nothing. `admin_key` opens all its routes."""

    client_key: str | None = None
    admin_key: str | None = None

    def spec(self, name: str, spot: Spot) -> ServerSpec:
        spec = super().spec(name, spot)
        assert spot.sidecar_port is not None
        placed = PlacedSidecar(
            vllm_url=spec.url,
            host=spec.host,
            port=spot.sidecar_port,
            number=int(name.rpartition("-")[2]),
            base_model=self.config.base_model_path,
            log_level=self.config.log_level,
            log_format=self.config.log_format,
        )
        sidecar = sidecar_spec(placed, placed.environment(self.key, self.admin_key, self.client_key))
        return replace(spec, env={**spec.env, **_group_interface(spec.host)}, sidecar=sidecar)


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
