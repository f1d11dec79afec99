"""Notes about samples whose `max_tokens` did not fit the context and was cut.

Each cut sample is counted. Only the first one of a sampling session gets a note, which the SDK writes to its user's
log: the same note for each of thousands of samples would flood that log.
"""

from __future__ import annotations

import logging

from skyrl.base.wire.sample_request import SampleRequest
from skyrl.server.sampling.job import SampleJob

logger = logging.getLogger(__name__)

MAX_REMEMBERED = 10_000
"""Sampling sessions that got a note. When there are more, all are forgotten, and each gets one more note."""


def cut_to(request: SampleRequest, job: SampleJob) -> int | None:
    """The number to which `max_tokens` was cut; None if it was not cut."""
    asked = request.sampling_params.max_tokens
    if asked is None or job.max_tokens is None or job.max_tokens >= asked:
        return None
    return job.max_tokens


class CutNotes:
    """Counts cut samples, and remembers the sampling sessions that got a note."""

    def __init__(self) -> None:
        self.count = 0
        self._noted: set[str] = set()

    def note(self, request: SampleRequest, job: SampleJob, sampler_id: str) -> str | None:
        """A sentence for the user; None if nothing was cut, or if the sampling session got a note before."""
        fits = cut_to(request, job)
        if fits is None:
            return None
        self.count += 1
        if sampler_id in self._noted:
            return None
        if len(self._noted) >= MAX_REMEMBERED:
            self._noted.clear()
        self._noted.add(sampler_id)
        asked = request.sampling_params.max_tokens
        logger.info("sampling session %s: max_tokens is cut to what fits, first from %d to %d", sampler_id, asked, fits)
        return (
            f"sampling_params.max_tokens: {asked} is more than the {fits} tokens that fit the model's context after "
            f"this prompt of {len(job.prompt)}; it was cut to {fits}. Later samples of this sampling client are cut in "
            "the same way without another notice"
        )
