"""A request as it is recorded, and how a repeat of a request is recognized."""

from __future__ import annotations

import hashlib

import msgspec

from skyrl.base.types.kinds import Kind
from skyrl.base.wire.errors import RequestError

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
