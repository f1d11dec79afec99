"""One request to the inference server: its exchange, its deadline, and the failures of its tries so far."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Generic, TypeVar

from skyrl.base.types.weights import AdapterVersion
from skyrl.runtime.processes.backoff import Backoff
from skyrl.server.sampling.endpoint import Endpoint
from skyrl.server.sampling.exchange import Exchange
from skyrl.server.sampling.progress import SampleProgress, SampleWait

T = TypeVar("T")

SETTLED_S = 2.0
"""A try that has run for this long has reached a server that runs: a server that is away fails a try sooner."""
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
        self.was_alone = False
        """Whether no other request of this process was sent during the last try."""
        self.deaths = 0
        """How often the server's engine died during a try that was alone."""
        self.aborts = 0
        """How often vLLM aborted the sample."""
        self.errors = 0
        """How often a server answered 5xx and then reported good health."""
        self.reloads: dict[Endpoint, int] = {}
        """How often each server has lost the adapter."""
        self.backoff = backoff
        self.trouble = "no inference server has been published"
        """The last failure, for the message when the deadline passes."""
        self.sent_at: float | None = None
        """When the running try was sent, in the event loop's time; None between tries."""
        self._waits_for: SampleWait | None = None
        self._waits_since = 0.0

    def wait_for(self, what: SampleWait, now: float) -> None:
        """Note what the next try waits for. If it is what the last try waited for, too, the wait goes on."""
        if what is not self._waits_for or self._has_settled(now):
            self._waits_for, self._waits_since = what, now
        self.sent_at = None

    def progress(self, now: float) -> SampleProgress:
        """Where the request stands at `now`, in the event loop's time."""
        has_adapter = isinstance(self.exchange.weights, AdapterVersion)
        if self.sent_at is not None and (self._waits_for is None or self._has_settled(now)):
            return SampleProgress(None, now - self.sent_at, has_adapter)
        if self._waits_for is None:  # nothing was sent yet, and nothing has failed
            return SampleProgress(None, 0.0, has_adapter)
        return SampleProgress(self._waits_for, now - self._waits_since, has_adapter)

    def _has_settled(self, now: float) -> bool:
        return self.sent_at is not None and now - self.sent_at > SETTLED_S

    @property
    def is_suspect(self) -> bool:
        """Whether this sample may be the one that kills the server."""
        return self.interruptions > FREE_INTERRUPTIONS
