"""What is recorded of a request before it has an outcome, and what makes two requests the same one."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from skyrl.types.kinds import Kind
from skyrl.wire.errors import RequestError

RequestKey = tuple[str, str, int]
"""("command", model_id, seq_id) or ("sample", sampling_session_id, seq_id): who repeats it gets the same request."""


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request to record. `body` is stored as the bytes that arrived. `identity` is what a repeat has in common with
    the first, the body when None. `id` is made when it is None; a repeat gets the first one's in any case. `not_before`
    is when it may start, in seconds since the epoch. A `numbered` command has no `seq_id` of its client's, and gets
    the one after all that the model has."""

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
        """The sampling session it is from, and its number there."""
        return None if self.sampling_session_id is None else (self.sampling_session_id, self.sample_seq_id)

    @property
    def key(self) -> RequestKey | None:
        if self.model_id is not None and self.seq_id is not None:
            return ("command", self.model_id, self.seq_id)
        if self.sampling_session_id is not None and self.sample_seq_id is not None:
            return ("sample", self.sampling_session_id, self.sample_seq_id)
        return None

    def digest(self) -> bytes:
        same = self.body if self.identity is None else self.identity
        return hashlib.blake2b(same, digest_size=16, person=self.kind.encode()[:16]).digest()


def same_request(request_id: str, recorded: bytes, repeated: bytes, key: RequestKey) -> str:
    """The id, if the two digests are one. Raises RequestError when the key was used before with another body."""
    if recorded != repeated:
        name = "model_seq_id" if key[0] == "command" and key[2] == 0 else "seq_id"
        raise RequestError(f"{key[2]} was used before for {key[1]} with another body", field=name)
    return request_id
