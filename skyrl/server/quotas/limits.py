"""The limits of one tenant: names, numbers, and the sentences of refusals. Other modules count and refuse."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from skyrl.base.config.server import ServerConfig

UNLIMITED = -1
"""In a tenant's exceptions: no quota, whatever the configuration says. None means the quota of the configuration."""


@dataclass(frozen=True, slots=True)
class QuotaLimits:
    """None: no quota. `tokens_per_minute` is a rate; the others bound what a tenant has at one time. Stored bytes are
    the bytes of checkpoints and of weights saved for sampling without a name."""

    requests_in_flight: int | None = None
    tokens_per_minute: int | None = None
    models: int | None = None
    stored_bytes: int | None = None

    @classmethod
    def of(cls, config: ServerConfig) -> QuotaLimits:
        """The quotas of all tenants without exceptions."""
        return cls(*(getattr(config, f"quota_{name}") for name in NAMES))

    def with_exceptions(self, exceptions: Sequence[int | None]) -> QuotaLimits:
        """The quotas of a tenant with these exceptions, in the order of NAMES."""
        defaults = (getattr(self, name) for name in NAMES)
        return QuotaLimits(*(_override(*pair) for pair in zip(defaults, exceptions, strict=True)))


@dataclass(frozen=True, slots=True)
class Bounds:
    """Upper bounds for every tenant, whatever its quotas are: each object costs memory and rows of the database."""

    sessions: int = 10_000
    sampling_sessions: int = 100_000
    models: int = 1_000

    @classmethod
    def of(cls, config: ServerConfig) -> Bounds:
        return cls(
            config.max_sessions_per_tenant,
            config.max_sampling_sessions_per_tenant,
            config.max_models_per_tenant,
        )


NAMES: tuple[str, ...] = tuple(field.name for field in fields(QuotaLimits))
LEAST = {"requests_in_flight": 1, "tokens_per_minute": 1, "models": 0, "stored_bytes": 0}
"""The smallest quotas. With 0 requests in flight or 0 tokens per minute, no request would ever start."""


def _override(default: int | None, exception: int | None) -> int | None:
    if exception is None:
        return default
    return None if exception == UNLIMITED else exception


def bound_sentence(kind: str, bound: int, count: int, objects: str, remedy: str) -> str:
    """Says that a tenant has reached one of `Bounds`, and names its configuration key. `kind` are the words of that
    key; `count` and `objects` say what the tenant has."""
    key = f"max_{kind.replace(' ', '_')}_per_tenant"
    return f"{key}: a tenant may have at most {bound}, and this API key's tenant has {count} {objects}: {remedy}"


def sampling_sessions_sentence(living: int, bound: int) -> str:
    objects = "sampling sessions in active sessions"
    return bound_sentence("sampling sessions", bound, living, objects, "finish a session that is done")


def stored_sentence(stored: int, limit: int) -> str:
    return (
        f"this API key's tenant has {stored} bytes of checkpoints and of weights saved for sampling, and may have "
        f"{limit}: delete checkpoints or give them a time to live, finish sessions that are done, or wait until "
        "weights that were saved without a name, and that nobody samples from, are deleted"
    )
