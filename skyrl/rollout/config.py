"""What a rollout client is told: where the router is, how much it may ask at once, and how it samples.

Names begin with `rollout_`. SGLang's names for the same values are aliases. Arguments of the engines themselves
(`vllm_*`, `sglang_*`) are in `skyrl.rollout.engines`.
"""

from __future__ import annotations

import difflib
import math
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any

ALIASES = {
    "sglang_router_ip": "rollout_router_ip",
    "sglang_router_port": "rollout_router_port",
    "sglang_server_concurrency": "rollout_concurrency",
    "sglang_dp_size": "rollout_dp_size",
    "sglang_router_policy": "rollout_router_policy",
    "sglang_enable_deterministic_inference": "rollout_deterministic_inference",
}
UNSET = {"sglang_server_concurrency": 512, "sglang_dp_size": 1, "sglang_enable_deterministic_inference": False}
"""What aliases have in a namespace of slime's arguments where the user has given nothing; the values of this client,
too. So they say nothing."""
ELSEWHERE = {
    "vllm_base_url": (
        "a vLLM is sampled from through a sidecar and a router: start `skyrl sidecar --vllm-url URL` and `skyrl router "
        "--worker SIDECAR`, or `skyrl rollout` in place of both, and give the router's address as rollout_router_ip "
        "and rollout_router_port"
    )
}
"""Names that others give an address of the engines by, and what to give here. Left alone, they would be ignored."""
MAX_SEED = 2**62


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """`rollout_concurrency` counts requests per engine. `rollout_dp_size` counts the data-parallel parts of an engine.
    With `rollout_deterministic_inference`, sample i of a group has the seed `rollout_seed` + i. `rollout_deadline_s`
    and `rollout_abort_timeout_s` are seconds: for one `generate`, and until workers are idle after `abort_all`.
    `rollout_base_model` and `rollout_state_dir` are for engines that are started here, `rollout_engine_urls` for those
    that run already. Raises ValueError, with the field's name, for a value that cannot be used."""

    rollout_router_ip: str = "127.0.0.1"
    rollout_router_port: int = 30_000
    rollout_router_policy: str | None = None
    rollout_api_key: str | None = None
    rollout_backend: str = "vllm"
    rollout_strategy: str = "plain"
    rollout_num_engines: int = 1
    rollout_dp_size: int = 1
    rollout_concurrency: int = 512
    rollout_deterministic_inference: bool = False
    rollout_seed: int = 42
    rollout_deadline_s: float = 3600.0
    rollout_abort_timeout_s: float = 120.0
    rollout_continue_partial: bool = True
    rollout_retry_interrupted: bool = True
    rollout_base_model: str | None = None
    rollout_state_dir: str | None = None
    rollout_engine_urls: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("rollout_num_engines", "rollout_dp_size", "rollout_concurrency"):
            _integer(name, getattr(self, name), 1, 2**31)
        _integer("rollout_router_port", self.rollout_router_port, 1, 65535)
        _integer("rollout_seed", self.rollout_seed, 0, MAX_SEED)
        for name in ("rollout_deadline_s", "rollout_abort_timeout_s"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise ValueError(f"{name}: must be a number of seconds above 0, got {value!r}")
        for name in ("rollout_deterministic_inference", "rollout_continue_partial", "rollout_retry_interrupted"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}: must be true or false, got {getattr(self, name)!r}")
        for name in ("rollout_router_ip", "rollout_backend", "rollout_strategy"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name):
                raise ValueError(f"{name}: must be a string that is not empty, got {getattr(self, name)!r}")
        for name in ("rollout_router_policy", "rollout_api_key", "rollout_base_model", "rollout_state_dir"):
            if not isinstance(getattr(self, name), str | None):
                raise ValueError(f"{name}: must be a string, got {getattr(self, name)!r}")
        if isinstance(self.rollout_engine_urls, str):
            raise ValueError("rollout_engine_urls: must be a list of URLs, got a string")
        object.__setattr__(self, "rollout_engine_urls", tuple(self.rollout_engine_urls))

    @property
    def router_url(self) -> str:
        host = self.rollout_router_ip
        return f"http://{f'[{host}]' if ':' in host else host}:{self.rollout_router_port}"

    @property
    def max_requests(self) -> int:
        """How many requests the client has at the router at once."""
        return self.rollout_concurrency * self.rollout_num_engines

    @classmethod
    def from_args(cls, args: object, *, others: Collection[str] = ()) -> RolloutConfig:
        """Read a mapping or a namespace. None counts as not given. Names without the prefix `rollout_`, other than the
        aliases, are not looked at; `others` are names that begin with `rollout_` and belong to the framework.

        Raises ValueError for an unknown name, for a value that cannot be used, and if a value and its alias differ. An
        alias that has its own default counts as not given: argparse gives it to every namespace.
        """
        values = {name: value for name, value in given_values(args).items() if UNSET.get(name, ...) != value}
        known = {field.name for field in fields(cls)}
        given: dict[str, Any] = {}
        for name in values:
            if name in known:
                given[name] = values[name]
            elif name.startswith("rollout_") and name not in others:
                nearest = difflib.get_close_matches(name, sorted(known), 1, 0.0)[0]
                raise ValueError(
                    f"{name}: unknown; the nearest known name is {nearest}, and names of the framework's own go into "
                    "`others`"
                )
        for alias, name in ALIASES.items():
            if alias not in values:
                continue
            if name in given and given[name] != values[alias]:
                raise ValueError(f"{name} is {given[name]!r} and its alias {alias} is {values[alias]!r}: give only one")
            warnings.warn(f"{alias} is deprecated; use {name}", DeprecationWarning, stacklevel=2)
            given[name] = values[alias]
        return cls(**given)


def given_values(args: object) -> dict[str, Any]:
    """The values of a mapping, or of a namespace, that are not None. Raises ValueError for a name that has another
    place here."""
    values = args if isinstance(args, Mapping) else vars(args)
    given = {name: value for name, value in values.items() if value is not None}
    for name, what in ELSEWHERE.items():
        if name in given:
            raise ValueError(f"{name}: {what}")
    return given


def _integer(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"{name}: must be an integer between {low} and {high}, got {value!r}")
