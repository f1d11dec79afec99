"""Requests: their ids, their kinds and which process runs each kind, how one is recorded and a repeat of it recognized,
and commands for the engine.

Ids of requests and sessions are unguessable, ordered by time, and made without asking the database.
"""

from __future__ import annotations

import hashlib
import os
import time
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

import msgspec

from skyrl.base.wire.errors import RequestError


def new_request_id() -> str:
    """48 bits of milliseconds since the epoch, then 96 random bits, in hex (36 characters)."""
    return f"{time.time_ns() // 1_000_000:012x}{os.urandom(12).hex()}"


def new_session_id() -> str:
    """Contains no '/' and no ':', because these separate the parts of model ids and of paths."""
    return f"s{new_request_id()}"


def sample_sequence_ids(request_id: str, num_samples: int) -> list[str]:
    """One id for each sequence of a sample request. A repeat of the request gets the same ids."""
    return [f"{request_id}-{index}" for index in range(num_samples)]


class Kind(StrEnum):
    """An API process forwards EXTERNAL samples, and ends CREATE_CUSTOM_LOSS at once. The engine runs all other
    kinds."""

    CREATE_MODEL = "CREATE_MODEL"
    FORWARD = "FORWARD"
    FORWARD_BACKWARD = "FORWARD_BACKWARD"
    OPTIM_STEP = "OPTIM_STEP"
    SAVE_WEIGHTS = "SAVE_WEIGHTS"
    SAVE_WEIGHTS_FOR_SAMPLER = "SAVE_WEIGHTS_FOR_SAMPLER"
    SAVE_WEIGHTS_EXTERNAL = "SAVE_WEIGHTS_EXTERNAL"
    LOAD_WEIGHTS = "LOAD_WEIGHTS"
    UNLOAD_MODEL = "UNLOAD_MODEL"
    SAMPLE = "SAMPLE"
    EXTERNAL = "EXTERNAL"
    CREATE_CUSTOM_LOSS = "CREATE_CUSTOM_LOSS"


PASSES = frozenset({Kind.FORWARD, Kind.FORWARD_BACKWARD})
"""Kinds that the engine may run together. All other commands of a model are exclusive."""

SAVES = frozenset({Kind.SAVE_WEIGHTS, Kind.SAVE_WEIGHTS_FOR_SAMPLER, Kind.SAVE_WEIGHTS_EXTERNAL})
"""Exclusive commands that do not change their model."""

FILE_COMMANDS = SAVES | {Kind.LOAD_WEIGHTS}
"""Exclusive commands that wait for files most of the time. Other models train meanwhile."""

SAMPLES = frozenset({Kind.SAMPLE, Kind.EXTERNAL})

ENGINE_KINDS = frozenset(Kind) - {Kind.EXTERNAL, Kind.CREATE_CUSTOM_LOSS}


RequestKey = tuple[str, str, int]
"""("command", model_id, seq_id) or ("sample", sampling_session_id, seq_id). A request whose key was used before is a
repeat."""


# Every sample makes one. As a frozen dataclass that would take three times as long.
class NewRequest(msgspec.Struct, frozen=True):
    """A request to record.

    `body` is stored as it arrived. `identity` is the part that a repeat must have in common with the first request;
    None stands for the body. If `id` is None, an id is made. A repeat gets the id of the first request, whatever its
    own `id`. The request may start at `not_before` (seconds since the epoch). `numbered` marks a command that came
    without a `seq_id`: it gets the number after the highest `seq_id` of its model."""

    kind: Kind
    tenant: str
    session_id: str
    body: bytes
    body_format: str = "json"
    model_id: str | None = None
    seq_id: int | None = None
    sampling_session_id: str | None = None
    sample_seq_id: int | None = None
    identity: bytes | None = None
    id: str | None = None
    not_before: float | None = None
    numbered: bool = False

    @property
    def sampler(self) -> tuple[str, int | None] | None:
        """The sampling session and the sample's number in it; None for a command."""
        return None if self.sampling_session_id is None else (self.sampling_session_id, self.sample_seq_id)

    @property
    def key(self) -> RequestKey | None:
        if self.model_id is not None and self.seq_id is not None:
            return ("command", self.model_id, self.seq_id)
        if self.sampling_session_id is not None and self.sample_seq_id is not None:
            return ("sample", self.sampling_session_id, self.sample_seq_id)
        return None

    def digest(self) -> bytes:
        """16 bytes: the hash of the kind and of `identity` or `body`."""
        identity = self.body if self.identity is None else self.identity
        return hashlib.blake2b(identity, digest_size=16, person=self.kind.encode()[:16]).digest()


def check_repeat(key: RequestKey, recorded_digest: bytes, digest: bytes) -> None:
    """Raises RequestError when the request recorded under `key` has another digest than its repeat."""
    if recorded_digest != digest:
        field = "model_seq_id" if key[0] == "command" and key[2] == 0 else "seq_id"
        raise RequestError(f"{key[2]} was used before for {key[1]} with another body", field=field)


@dataclass(frozen=True, slots=True)
class Command:
    """One request for the engine. `n` is its number in the order of arrival. `size` is the length of its body in bytes.
    It was recorded at `accepted_at`, and the engine must not start it before `not_before` (both in seconds since the
    epoch)."""

    n: int
    request_id: str
    kind: Kind
    tenant: str
    session_id: str
    model_id: str | None
    seq_id: int | None
    sampling_session_id: str | None
    sample_seq_id: int | None
    body_format: str
    size: int
    not_before: float | None = None
    accepted_at: float = 0.0
    trace: str | None = None
    """The `traceparent` of the request that recorded it; None if it is not traced."""

    @property
    def is_pass(self) -> bool:
        return self.kind in PASSES


@dataclass(frozen=True, slots=True)
class ExecutedCommand:
    """A command that has changed its model. `status` is `failed` only for an optimizer step that failed because of its
    caller's mistake. `completed_at` is when the outcome was stored, in seconds since the epoch."""

    command: Command
    status: Literal["done", "failed"]
    completed_at: float
