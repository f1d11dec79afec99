"""What one tenant may use. Names and numbers only: who counts, and who refuses, is others' business."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from skyrl.config.server import ServerConfig

UNLIMITED = -1
"""In a tenant's exceptions: no quota, whatever the configuration says. None is what the configuration says."""


@dataclass(frozen=True, slots=True)
class QuotaLimits:
    """None: no quota. Tokens are a rate; of the others so many are held at once. Stored bytes are of checkpoints and of
    weights that were saved for sampling without a name."""

    requests_in_flight: int | None = None
    tokens_per_minute: int | None = None
    models: int | None = None
    stored_bytes: int | None = None

    @classmethod
    def of(cls, config: ServerConfig) -> QuotaLimits:
        """Those of every tenant without exceptions."""
        return cls(*(getattr(config, f"quota_{name}") for name in NAMES))

    def but(self, exceptions: Sequence[int | None]) -> QuotaLimits:
        """With one tenant's exceptions, in the order of NAMES."""
        defaults = (getattr(self, name) for name in NAMES)
        return QuotaLimits(*(_meant(*pair) for pair in zip(defaults, exceptions, strict=True)))


@dataclass(frozen=True, slots=True)
class Bounds:
    """What no tenant may exceed, whatever its quotas are: each of these costs memory and rows of the database."""

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
"""With less, what was accepted would wait for ever."""


def _meant(default: int | None, exception: int | None) -> int | None:
    if exception is None:
        return default
    return None if exception == UNLIMITED else exception


def bound_sentence(what: str, bound: int, held: int, held_what: str, remedy: str) -> str:
    """Says that a tenant holds as much as one of `Bounds` lets it. Names the configuration key, which bounds all
    tenants."""
    key = f"max_{what.replace(' ', '_')}_per_tenant"
    return f"{key}: a tenant may have at most {bound}, and this API key's tenant has {held} {held_what}: {remedy}"


def sampling_sessions_sentence(living: int, bound: int) -> str:
    held = "sampling sessions in active sessions"
    return bound_sentence("sampling sessions", bound, living, held, "finish a session that is done")


def stored_sentence(stored: int, limit: int) -> str:
    return (
        f"this API key's tenant has {stored} bytes of checkpoints and of weights saved for sampling, and may have "
        f"{limit}: delete checkpoints or give them a time to live, finish sessions that are done, or wait until "
        "weights that were saved without a name, and that nobody samples from, are deleted"
    )
