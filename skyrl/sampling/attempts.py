"""One request on its way to the inference server: what is posted, until when, and what it has been through so far."""

from __future__ import annotations

from collections.abc import Mapping

from skyrl.processes.backoff import Backoff
from skyrl.sampling import completion
from skyrl.sampling.endpoint import Endpoint
from skyrl.sampling.job import SampleJob

FREE_INTERRUPTIONS = 1
"""A sample that has been interrupted more often is a suspect, and waits for its turn to be sent again."""


class Attempts:
    """Counters of one request. `deadline` is in the event loop's time; `backoff` gives the pauses between its tries."""

    def __init__(
        self, job: SampleJob, priority: int | None, headers: Mapping[str, str], deadline: float, backoff: Backoff
    ) -> None:
        self.job = job
        """With `max_tokens` None until the server was asked how many fit."""
        self.priority = priority
        self.body = None if job.max_tokens is None else completion.encode_request(job, priority)
        self.headers = headers
        self.deadline = deadline
        self.failed: Endpoint | None = None
        """The endpoint that did not work, to be looked up again."""
        self.interruptions = 0
        self.alone = False
        """Whether it was the only suspect when it was sent last."""
        self.aborts = 0
        self.errors = 0
        self.reloads = 0
        self.backoff = backoff
        self.trouble = "no inference server has been published"
        """What is told when the deadline passes."""

    @property
    def suspect(self) -> bool:
        return self.interruptions > FREE_INTERRUPTIONS
