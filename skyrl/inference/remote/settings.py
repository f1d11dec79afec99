"""The environment variables of a node: where its adapters and full weights come from, and where it keeps them; and the
settings of the sidecar of a placed vLLM, as they travel to its process.

The server that trains sets the store. Whoever starts vLLM on a node sets the cache's directory there. Credentials of
the store come from the node's own environment, unless the server's options hold them. Imports nothing of the sidecar
itself, so that a launcher loads neither its HTTP client nor NumPy for it: a tenth of the CPU of its imports."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from skyrl.base.config.server import ServerConfig
from skyrl.runtime.processes.logs import LogFormat, LogLevel
from skyrl.storage.checkpoint_store.registry import store_url

STORE, STORE_OPTIONS = "SKYRL_NODE_STORE", "SKYRL_NODE_STORE_OPTIONS"
CACHE, CACHE_BYTES = "SKYRL_NODE_CACHE", "SKYRL_NODE_CACHE_BYTES"
API_KEY = "VLLM_API_KEY"
DEFAULT_CACHE_BYTES = 20 * 2**30


@dataclass(frozen=True)
class NodeSettings:
    """`cache` is the node's directory for weights, shared by the vLLMs of one server on the node. Weights that no vLLM
    has loaded take at most `cache_bytes` with the loaded ones. `api_key` is vLLM's own."""

    store: str
    cache: Path
    api_key: str
    store_options: Mapping[str, str] = field(default_factory=dict)
    cache_bytes: int = DEFAULT_CACHE_BYTES

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> NodeSettings:
        """Raises ValueError when a variable is missing or cannot be read."""
        values = os.environ if environment is None else environment
        for name in (STORE, API_KEY):
            if not values.get(name):
                raise ValueError(f"{name} is not set: nothing can be fetched from the checkpoint store")
        return cls(
            store=values[STORE],
            cache=Path(values.get(CACHE) or default_cache(values[STORE])),
            api_key=values[API_KEY],
            store_options=json.loads(values.get(STORE_OPTIONS) or "{}"),
            cache_bytes=int(values.get(CACHE_BYTES) or DEFAULT_CACHE_BYTES),
        )


def default_cache(store: str) -> Path:
    """The node's directory for weights of this store, if nobody configures one: another store may have other files
    under the same keys."""
    name = hashlib.sha256(store.encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"skyrl-adapters-{os.getuid()}-{name}"


def node_environment(config: ServerConfig) -> dict[str, str]:
    """The variables that name the server's checkpoint store to a vLLM."""
    options = config.checkpoint_store_options
    return {STORE: store_url(config), **({STORE_OPTIONS: json.dumps(options)} if options else {})}


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
    max_body_bytes: int
    log_level: LogLevel = "info"
    log_format: LogFormat = "text"

    def environment(self, vllm_key: str, admin_key: str | None, client_key: str | None) -> dict[str, str]:
        """The variables of its process. `client_key` opens what needs no admin key; with None that is open to all who
        reach the address."""
        keys = {API_KEY: vllm_key, ADMIN_KEY: admin_key, CLIENT_KEY: client_key}
        return {SIDECAR: json.dumps(asdict(self)), **{name: key for name, key in keys.items() if key is not None}}

    @classmethod
    def from_environment(cls, values: Mapping[str, str]) -> PlacedSidecar:
        return cls(**json.loads(values[SIDECAR]))
