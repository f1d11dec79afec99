"""Which `SKYRL_*` environment variables there are: one that nobody reads is a mistake, and is told before a start.

Knows names. Deliberately does not read values: the configuration does, and the few parts that have a variable of
their own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from skyrl.config.backend import ConfigError, unknown

PREFIX = "SKYRL_"
OWN = ("SKYRL_RUNTIME_FILE", "SKYRL_API_SLOT", "SKYRL_API_SOCKETS", "SKYRL_VLLM_FORK_ENGINE")
"""What processes of a server tell each other."""
_TESTS = "SKYRL_TEST_"
_KUBERNETES = re.compile(r"\w*(_SERVICE_HOST|_SERVICE_PORT(_\w+)?|_PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)")
"""What Kubernetes tells every container of a namespace in which a service's name begins with `skyrl`."""


def refuse_unknown(environment: Mapping[str, str], keys: Iterable[str]) -> None:
    """Raises ConfigError for a variable that stands for none of the configuration's `keys`, with the nearest one that
    does."""
    known = [f"{PREFIX}{key.upper()}" for key in keys]
    for name in environment:
        upper = name.upper()  # as the configuration reads them
        if not upper.startswith(PREFIX) or upper in known or upper in OWN or upper.startswith(_TESTS):
            continue
        if not _KUBERNETES.fullmatch(upper):
            raise ConfigError(f"environment: {unknown(name, known)}")
