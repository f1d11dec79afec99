"""The settings of the sidecar of a placed vLLM, as they travel to its process.

Imports nothing of the sidecar itself, so that a launcher loads neither aiohttp nor NumPy for it: a tenth of the CPU of
its imports.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from skyrl.inference.remote.settings import API_KEY
from skyrl.runtime.processes.logs import LogFormat

SIDECAR = "SKYRL_NODE_SIDECAR"
ADMIN_KEY, CLIENT_KEY = "SKYRL_NODE_ADMIN_KEY", "SKYRL_NODE_CLIENT_KEY"


@dataclass(frozen=True)
class PlacedSidecar:
    """`vllm_url` is that of the vLLM beside it; `host` and `port` are where it listens. `number` is that of its vLLM.
    `base_model` is a directory or a name of the model hub."""

    vllm_url: str
    host: str
    port: int
    number: int
    base_model: str
    log_level: str = "info"
    log_format: LogFormat = "text"

    def environment(self, vllm_key: str, admin_key: str | None, client_key: str | None) -> dict[str, str]:
        """The variables of its process. `client_key` opens what needs no admin key; with None that is open to all who
        reach the address."""
        keys = {API_KEY: vllm_key, ADMIN_KEY: admin_key, CLIENT_KEY: client_key}
        return {SIDECAR: json.dumps(asdict(self)), **{name: key for name, key in keys.items() if key is not None}}

    @classmethod
    def from_environment(cls, values: Mapping[str, str]) -> PlacedSidecar:
        return cls(**json.loads(values[SIDECAR]))
