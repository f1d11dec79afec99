"""vLLM with a sidecar that serves clients, on a node of a Ray cluster: the engines of `skyrl rollout`."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from dataclasses import dataclass, replace

from skyrl.inference.engine_kinds import Vllm, sidecar_spec
from skyrl.inference.placement import ServerSpec, Spot
from skyrl.nodes.sidecar import PlacedSidecar

_GET_ADDRESS = 0x8915
"""SIOCGIFADDR of Linux."""


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
    name = interface_of(host)
    return {} if name is None else {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name}


def interface_of(host: str) -> str | None:
    """The name of the interface that has this address. None for loopback, and if none has it."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    if address.is_loopback:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(asked.fileno(), _GET_ADDRESS, struct.pack("256s", name.encode()[:15]))
            except OSError:  # an interface without an IPv4 address
                continue
            if socket.inet_ntoa(answer[20:24]) == host:
                return name
    return None
