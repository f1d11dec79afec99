"""In which order samples of several tenants run: start-time fair queueing, with vLLM as the server.

Time here is counted in tokens that a tenant which always waits is given. Every sample gets a stretch of its tenant's
time, one after the other, and vLLM runs next what has the lowest number. Knows no server and no request but by tenant.
"""

from __future__ import annotations

from dataclasses import dataclass

from skyrl.sampling.completion import SampleAnswer
from skyrl.sampling.job import SampleJob

FIRST_LENGTH = 256.0
"""Tokens of a sequence of a tenant that has had none yet, if it asks for so many."""
WEIGHT = 1 / 16
"""Of the newest sample in the average length of its tenant's sequences."""
MAX_LENGTHS = 10_000
"""Tenants whose average is kept."""


@dataclass(slots=True)
class _Tenant:
    """Of one with samples on their way: how many, and where the stretch of the last one ends."""

    in_flight: int = 0
    end: int = 0


@dataclass(frozen=True, slots=True)
class Place:
    """Where a sample's stretch begins, and the number that says when it is to run: the lower, the earlier.

    The number is the stretch's middle: all sequences of a sample have the same, and it may have thousands.
    """

    tenant: str
    start: int
    priority: int


class FairOrder:
    """Gives samples their places. A tenant that had nothing on its way begins now: it is neither owed the time in which
    it asked for nothing, nor held to what it got while nobody else asked.

    What a sample will cost is guessed from how long its tenant's sequences have been: what may be sampled at most would
    be held against whoever asks for more than is used.
    """

    def __init__(self) -> None:
        self.now = 0
        """The latest start of a sample that has been answered."""
        self._tenants: dict[str, _Tenant] = {}
        self._lengths: dict[str, float] = {}

    def enter(self, tenant: str, job: SampleJob) -> Place:
        """The place of a sample that is sent now; every one is to `leave`."""
        known = self._tenants.get(tenant)
        if known is None:
            known = self._tenants[tenant] = _Tenant()
        length = self._lengths.get(tenant, FIRST_LENGTH)
        if job.max_tokens is not None and job.max_tokens < length:
            length = job.max_tokens
        cost = len(job.prompt) + int(job.num_samples * length)
        start = max(self.now, known.end)
        known.end = start + cost
        known.in_flight += 1
        return Place(tenant, start, start + cost // 2)

    def leave(self, place: Place, sequences: int, answer: SampleAnswer | None) -> None:
        """The sample has ended; without an answer if it was not run, or nobody knows."""
        known = self._tenants[place.tenant]
        known.in_flight -= 1
        if not known.in_flight:
            del self._tenants[place.tenant]
        if answer is None:
            return
        if place.start > self.now:
            self.now = place.start
        length = answer.sampled_tokens / sequences
        average = self._lengths.get(place.tenant)
        if average is None and len(self._lengths) >= MAX_LENGTHS:
            self._lengths.clear()
        self._lengths[place.tenant] = length if average is None else average + WEIGHT * (length - average)

    def catch_up(self, now: int) -> None:
        """It is at least `now` in another process that sends to the same server."""
        self.now = max(self.now, now)
