"""Tells of samples whose `max_tokens` does not fit the context and was cut to what fits.

Each is counted. The first one of a sampling session also gets a note, which the SDK writes to its user's log; the
others would say the same again, thousands of times.
"""

from __future__ import annotations

import logging

from skyrl.sampling.job import SampleJob
from skyrl.wire.sample_request import SampleRequest

logger = logging.getLogger(__name__)

MAX_REMEMBERED = 10_000
"""Sampling sessions that were told. When there are more, all are forgotten, and told once more."""


def cut_to(request: SampleRequest, job: SampleJob) -> int | None:
    """The `max_tokens` that is used instead of the one that was asked for; None when they are the same."""
    asked = request.sampling_params.max_tokens
    if asked is None or job.max_tokens is None or job.max_tokens >= asked:
        return None
    return job.max_tokens


class CutNotes:
    """Counts cut samples, and remembers who was told."""

    def __init__(self) -> None:
        self.count = 0
        self._told: set[str] = set()

    def note(self, request: SampleRequest, job: SampleJob, sampler_id: str) -> str | None:
        """A sentence for the user; None when nothing was cut, or this sampling session was told before."""
        fits = cut_to(request, job)
        if fits is None:
            return None
        self.count += 1
        if sampler_id in self._told:
            return None
        if len(self._told) >= MAX_REMEMBERED:
            self._told.clear()
        self._told.add(sampler_id)
        asked = request.sampling_params.max_tokens
        logger.info("sampling session %s: max_tokens is cut to what fits, first from %d to %d", sampler_id, asked, fits)
        return (
            f"sampling_params.max_tokens: {asked} is more than the {fits} tokens that fit the model's context after "
            f"this prompt of {len(job.prompt)}; it was cut to {fits}, as it will be for each such sample of this "
            "sampling client without another notice"
        )
