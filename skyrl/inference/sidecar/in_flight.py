"""The samples that the sidecar has taken and not ended: their number, their bound, and how they are aborted.

An abort must reach vLLM also if vLLM has accepted the request but not registered it yet: vLLM ignores such an abort
silently. So the abort is repeated until the sample has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from skyrl.inference.sidecar.errors import BadRequest, Busy, NotOffered, SidecarError
from skyrl.inference.sidecar.gate import Gate
from skyrl.inference.sidecar.vllm import Vllm

logger = logging.getLogger(__name__)

REPEAT_S = 0.05
"""Between two aborts of the same sample."""


@dataclass(eq=False, slots=True)
class Sample:
    """`rid` is the request's, `id` the sample's own. `request_id` is unique also if clients use a rid twice."""

    rid: str
    id: str
    has_pictures: bool = False
    request_id: str = field(default_factory=lambda: f"sidecar-{uuid.uuid4().hex}")
    aborted: asyncio.Event = field(default_factory=asyncio.Event)
    given_up: asyncio.Event = field(default_factory=asyncio.Event)
    """vLLM cannot end the sample by request: close the connection, and answer with what is known."""
    sent: bool = False

    @property
    def vllm_id(self) -> str:
        """The name under which vLLM aborts the sample. Each of vLLM's routes makes another name."""
        return f"generate-tokens-{self.request_id}" if self.has_pictures else f"cmpl-{self.request_id}-0"


class InFlight:
    """All samples, and the requests that pass through and sample. `run` must run while samples are taken. `idle` is set
    while there is nothing, `quiet` while vLLM has nothing: what waits at `gate` does not count."""

    def __init__(self, vllm: Vllm, max_samples: int, abort_s: float) -> None:
        self._vllm = vllm
        self._max = max_samples
        self._abort_s = abort_s
        self._samples: set[Sample] = set()
        self._passing = 0
        self._aborting: dict[Sample, float] = {}
        """Aborted samples that vLLM has, and when to give them up."""
        self._wake = asyncio.Event()
        self._waiting_to_pass = 0
        self._end_of_waiting = asyncio.Event()
        """Ends what waits at the gate to pass through."""
        self.gate = Gate()
        self.idle = asyncio.Event()
        self.idle.set()
        self.quiet = asyncio.Event()
        self.quiet.set()
        self.draining = False

    @property
    def running(self) -> int:
        """Samples that vLLM has, and requests that pass through and sample. Another thread may ask: hence the copy."""
        return sum(sample.sent for sample in [*self._samples]) + self._passing

    @property
    def waiting(self) -> int:
        return sum(not sample.sent for sample in [*self._samples]) + self._waiting_to_pass

    def admit(self, samples: list[Sample]) -> None:
        """Raises Busy, and BadRequest for more samples than can ever be taken. Call `end` for each admitted sample."""
        if self.draining:
            raise Busy("the sidecar is stopping")
        if len(samples) > self._max:
            raise BadRequest(f"n, text, input_ids: a request may have {self._max} samples, this one has {len(samples)}")
        if len(self._samples) + len(samples) > self._max:
            raise Busy(f"{len(self._samples)} samples are in flight, the most is {self._max}")
        self._samples.update(samples)
        self.idle.clear()

    async def send(self, sample: Sample) -> bool:
        """Wait at the gate. True: the sample counts as sent, and must be sent now. False: it was aborted before."""
        if not await self.gate.passed(sample.aborted):
            return False
        sample.sent = True
        self.quiet.clear()
        return True

    def end(self, sample: Sample) -> None:
        self._samples.discard(sample)
        self._aborting.pop(sample, None)
        self._check_idle()

    @contextlib.asynccontextmanager
    async def passing(self) -> AsyncIterator[None]:
        """Wait at the gate, and count a request that samples without being one of /generate. Raises Busy, also when it
        is aborted at the gate: only vLLM can write the answer of an aborted request."""
        if self.draining:
            raise Busy("the sidecar is stopping")
        if len(self._samples) + self._waiting_to_pass >= self._max and not self.gate.is_open:
            raise Busy(f"{self._waiting_to_pass} requests wait, because generation is paused")
        self._waiting_to_pass += 1
        self.idle.clear()
        passed = False
        try:
            passed = await self.gate.passed(self._end_of_waiting)
            self._passing += passed
        finally:
            self._waiting_to_pass -= 1
            self._check_idle()
        if not passed:
            raise Busy("the request was aborted while it waited, because generation is paused")
        self.quiet.clear()
        try:
            yield
        finally:
            self._passing -= 1
            self._check_idle()

    def _check_idle(self) -> None:
        if not self.running:
            self.quiet.set()
        if not self._samples and not self._passing and not self._waiting_to_pass:
            self.idle.set()

    def abort(self, rid: str) -> None:
        """Abort the samples whose rid, or own id, begins with `rid`."""
        self._abort([one for one in self._samples if one.rid.startswith(rid) or one.id.startswith(rid)])

    async def abort_all(self) -> None:
        """Abort all samples, and what passes through. Raises SidecarError."""
        self._abort([*self._samples])
        self._end_of_waiting.set()
        self._end_of_waiting = asyncio.Event()
        await self._abort_passing()

    async def abort_running(self) -> None:
        """As `abort_all`, without what waits at the gate."""
        self._abort([sample for sample in self._samples if sample.sent])
        await self._abort_passing()

    async def _abort_passing(self) -> None:
        if self._passing:
            with contextlib.suppress(NotOffered):  # then they end by themselves
                await self._vllm.call("POST", "/abort_requests", {})

    def _abort(self, samples: list[Sample]) -> None:
        for sample in samples:
            if not sample.aborted.is_set():
                sample.aborted.set()
                if sample.sent:
                    self._end_in_vllm(sample)

    def _end_in_vllm(self, sample: Sample) -> None:
        self._aborting[sample] = asyncio.get_running_loop().time() + self._abort_s
        self._wake.set()

    async def run(self) -> None:
        """Abort samples in vLLM, again and again until they have ended. Runs until it is cancelled."""
        while True:
            await self._wake.wait()
            if not self._aborting:
                self._wake.clear()
                continue
            now = asyncio.get_running_loop().time()
            for sample in [one for one, deadline in self._aborting.items() if deadline <= now]:
                logger.warning("vLLM has not ended %s within %g s: its connection is closed", sample.id, self._abort_s)
                self._give_up(sample)
            if self._aborting:
                await self._abort_in_vllm([*self._aborting])
                await asyncio.sleep(REPEAT_S)

    async def _abort_in_vllm(self, samples: list[Sample]) -> None:
        try:
            await self._vllm.call("POST", "/abort_requests", {"request_ids": [sample.vllm_id for sample in samples]})
        except NotOffered:
            for sample in samples:
                self._give_up(sample)
        except SidecarError as error:
            logger.warning("an abort is repeated: %s", error)

    def _give_up(self, sample: Sample) -> None:
        self._aborting.pop(sample, None)
        sample.given_up.set()
