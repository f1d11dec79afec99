"""One request to the inference server: its exchange, its deadline, and the failures of its tries so far."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Generic, TypeVar

from skyrl.processes.backoff import Backoff
from skyrl.sampling.endpoint import Endpoint
from skyrl.sampling.exchange import Exchange

T = TypeVar("T")

FREE_INTERRUPTIONS = 1
"""A sample that was interrupted more often is a suspect: it waits for its turn before it is sent again."""


class Attempts(Generic[T]):
    """The state of one request. `deadline` is in the event loop's time; `backoff` gives the pauses between tries."""

    def __init__(self, exchange: Exchange[T], headers: Mapping[str, str], deadline: float, backoff: Backoff) -> None:
        self.exchange = exchange
        self.headers = headers
        self.deadline = deadline
        self.failed: Endpoint | None = None
        """The endpoint of the last try if that try failed; the next try looks the endpoint up again."""
        self.interruptions = 0
        """How often the connection broke, or the server died, while the server had the request."""
        self.sent_alone = False
        """Whether no other suspect was sent during the last try."""
        self.aborts = 0
        """How often vLLM aborted the sample."""
        self.errors = 0
        """How often a server answered 5xx and then reported good health."""
        self.reloads: Counter[Endpoint] = Counter()
        """How often each server has lost the adapter."""
        self.backoff = backoff
        self.trouble = "no inference server has been published"
        """The last failure, for the message when the deadline passes."""

    @property
    def is_suspect(self) -> bool:
        """Whether this sample may be the one that kills the server."""
        return self.interruptions > FREE_INTERRUPTIONS
