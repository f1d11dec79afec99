"""One request on its way to the inference server: what is sent, until when, and what has gone wrong so far."""

from __future__ import annotations

from collections.abc import Mapping

from skyrl.processes.backoff import Backoff
from skyrl.sampling import completion
from skyrl.sampling.endpoint import Endpoint
from skyrl.sampling.job import SampleJob

FREE_INTERRUPTIONS = 1
"""A sample that was interrupted more often is a suspect, and is sent again only when it is its turn."""


class Attempts:
    """Counters of one request. `deadline` is in the event loop's time; `backoff` gives the pauses between its tries."""

    def __init__(
        self, job: SampleJob, priority: int | None, headers: Mapping[str, str], deadline: float, backoff: Backoff
    ) -> None:
        self.job = job
        """Its `max_tokens` may be None; then each try asks the server how many tokens fit."""
        self.priority = priority
        self.body = None if job.max_tokens is None else completion.encode_request(job, priority)
        self.headers = headers
        self.deadline = deadline
        self.failed: Endpoint | None = None
        """The endpoint of the last try, if that try failed there: it is looked up again."""
        self.interruptions = 0
        """How often the connection broke, or the server died, while the server had the request."""
        self.alone = False
        """Whether no other suspect was sent beside the last try."""
        self.aborts = 0
        """How often vLLM gave the sample up."""
        self.errors = 0
        """How often a server failed that was well when it was asked."""
        self.reloads = 0
        """How often this server has lost the adapter."""
        self.backoff = backoff
        self.trouble = "no inference server has been published"
        """What went wrong last, for the message when the deadline passes."""

    @property
    def suspect(self) -> bool:
        """Whether the sample may be what the server dies of."""
        return self.interruptions > FREE_INTERRUPTIONS
