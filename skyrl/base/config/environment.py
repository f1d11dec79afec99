"""The names of the `SKYRL_*` environment variables. An unknown one is an error, because it is probably misspelled.

Does not read their values: the configuration does, and the processes that tell each other something in a variable.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from skyrl.base.config.backend import ConfigError, unknown_key

PREFIX = "SKYRL_"
OWN = ("SKYRL_RUNTIME_FILE", "SKYRL_API_SLOT", "SKYRL_API_SOCKETS", "SKYRL_BASE_MODEL_NUMBER", "SKYRL_VLLM_FORK_ENGINE")
"""Variables by which the processes of a server tell each other something."""
NODES = ("SKYRL_NODE_STORE", "SKYRL_NODE_STORE_OPTIONS", "SKYRL_NODE_CACHE", "SKYRL_NODE_CACHE_BYTES")
"""Variables that tell a vLLM where its node's adapters come from and lie (`skyrl.inference.remote.settings`)."""
PLANE = ("SKYRL_ROUTER_API_KEY", "SKYRL_ADMIN_KEY", "SKYRL_VLLM_API_KEY")
"""Variables with keys for `skyrl rollout`, `skyrl router` and `skyrl sidecar`."""
_TESTS = "SKYRL_TEST_"
_KUBERNETES = re.compile(r"\w*(_SERVICE_HOST|_SERVICE_PORT(_\w+)?|_PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)")
"""Variables that Kubernetes sets in containers beside a service with a name that begins with `skyrl`."""


def refuse_unknown(environment: Mapping[str, str], keys: Iterable[str]) -> None:
    """Raises ConfigError for a `SKYRL_*` variable that is unknown. `keys` are those of the configuration; each has a
    variable."""
    known = [f"{PREFIX}{key.upper()}" for key in keys]
    for name in environment:
        upper = name.upper()  # the configuration ignores the case of a variable's name, too
        if not upper.startswith(PREFIX) or upper in known or upper.startswith(_TESTS):
            continue
        if upper in (*OWN, *NODES, *PLANE):
            continue
        if not _KUBERNETES.fullmatch(upper):
            raise ConfigError(f"environment: {unknown_key(name, known)}")
