"""What can go wrong in a rollout, as exceptions."""

from __future__ import annotations


class RolloutError(Exception):
    """Base of all errors of the rollout client."""


class RequestRefused(RolloutError):
    """The server answered with an error that does not go away by asking again. `status` is HTTP's."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"HTTP {status}: {message}")
        self.status = status
        self.message = message


class BadAnswer(RolloutError):
    """The answer lacks something or contradicts itself, so no sample can be made of it."""


class RolloutTimeout(RolloutError):
    """The deadline has gone by. The text says which one, and the last failure."""


class Interrupted(RolloutError, ConnectionError):
    """The connection broke after the request was sent: a worker may have sampled already."""


class EngineError(RolloutError):
    """An engine could not be started, registered or removed."""
