"""The samples that the sidecar has taken and not ended: their number, their bound, and how they are aborted; the gate
where new samples wait; and the pauses of generation.

An abort must reach vLLM also if vLLM has accepted the request but not registered it yet: vLLM ignores such an abort
silently. So the abort is repeated until the sample has ended.

A pause is made by hand, or by holds, such as for the moment in which weights change. While generation is paused the
gate is closed, so no new sample reaches vLLM. Those that vLLM has are frozen there, or aborted."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from enum import StrEnum

from skyrl.inference.sidecar.errors import BadRequest, Busy, NotOffered, Refused, SidecarError, VllmAway, VllmGone
from skyrl.inference.sidecar.facts import is_paused
from skyrl.inference.sidecar.vllm import Vllm
from skyrl.runtime.processes.supervision import set_within

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
    while there is nothing, `quiet` while vLLM has nothing: what waits at the gate does not count."""

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
        self.opened = asyncio.Event()
        """Set while new samples go to vLLM, and do not wait at the gate."""
        self.opened.set()
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
        if not await self._passed_gate(sample.aborted):
            return False
        sample.sent = True
        self.quiet.clear()
        return True

    async def _passed_gate(self, given_up: asyncio.Event) -> bool:
        """Wait until the gate is open. False when `given_up` came first. When this returns True the gate is open, and
        stays so until the caller awaits something."""
        while not self.opened.is_set() and not given_up.is_set():
            waiting = {asyncio.ensure_future(event.wait()) for event in (self.opened, given_up)}
            try:
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for one in waiting:
                    one.cancel()
        return not given_up.is_set()

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
        if len(self._samples) + self._waiting_to_pass >= self._max and not self.opened.is_set():
            raise Busy(f"{self._waiting_to_pass} requests wait, because generation is paused")
        self._waiting_to_pass += 1
        self.idle.clear()
        passed = False
        try:
            passed = await self._passed_gate(self._end_of_waiting)
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


RETRY_S = 0.5
ABORT_AGAIN_S = 0.05


class PauseMode(StrEnum):
    """What happens to samples in flight."""

    ABORT = "abort"
    """They end at once, and are answered with what they have."""
    RETRACT = "retract"
    """They are frozen. Their cache may be flushed; then it is computed again."""
    IN_PLACE = "in_place"
    """They are frozen with their cache."""


class Hold:
    """One reason to keep generation frozen, besides a pause by hand."""

    def __init__(self) -> None:
        self.stays_paused = False
        """Generation stays paused after this hold, until somebody continues it."""


class Pause:
    """`run` must run while this is used. `abort_s`: how long the end of aborted samples may take. `call_s`: how long
    vLLM may take to pause and to continue; a pause waits for the end of its present step."""

    def __init__(self, vllm: Vllm, in_flight: InFlight, abort_s: float, call_s: float) -> None:
        self._vllm = vllm
        self._in_flight = in_flight
        self._abort_s = abort_s
        self._call_s = call_s
        self._order = asyncio.Lock()
        self._holds: set[Hold] = set()
        self._resume_later = asyncio.Event()
        self.mode: PauseMode | None = None
        """Set by hand; None while nobody has paused."""
        self._is_found = False
        """`mode` is that of a pause before this sidecar started: by hand, or by a hold that nobody ends any more."""

    async def pause(self, mode: PauseMode) -> None:
        """The last word counts. With ABORT, returns when vLLM has no sample. Raises SidecarError."""
        async with self._order:
            await self._close("abort" if mode is PauseMode.ABORT else "keep")
            self.mode, self._is_found = mode, False
            if mode is PauseMode.ABORT:
                await self.end_all()

    async def resume(self) -> None:
        """Also when nobody has paused. A hold that still lasts keeps generation paused until it ends. Raises
        SidecarError; then the pause goes on."""
        async with self._order:
            if not self._holds:
                await self._open()
            self.mode, self._is_found = None, False

    def forget_found(self) -> None:
        """A pause that was found ends with the hold that lasts now."""
        if self._is_found and self._holds:
            self.mode, self._is_found = None, False

    async def hold(self) -> Hold:
        """Freeze generation until `let_go`. Raises SidecarError."""
        async with self._order:
            if self.mode is None and not self._holds:
                await self._close("keep")
            hold = Hold()
            self._holds.add(hold)
            return hold

    async def let_go(self, hold: Hold) -> None:
        """Generation is as it was before the hold, or as somebody has set it meanwhile."""
        async with self._order:
            self._holds.remove(hold)
            if hold.stays_paused and self.mode is None:
                self.mode = PauseMode.IN_PLACE
            if self.mode is None and not self._holds:
                try:
                    await self._open()
                except SidecarError as error:
                    logger.warning("generation is continued later: %s", error)
                    self._resume_later.set()

    @contextlib.asynccontextmanager
    async def held(self) -> AsyncIterator[Hold]:
        """A hold for the time of the body. Raises SidecarError before the body."""
        hold = await self.hold()
        try:
            yield hold
        finally:
            await self.let_go(hold)

    async def end_all(self) -> None:
        """Abort everything that vLLM has, and wait until it has been answered. Generation must be paused. Raises
        VllmAway if something does not end."""
        try:
            async with asyncio.timeout(self._abort_s + 1):
                while not self._in_flight.quiet.is_set():
                    await self._in_flight.abort_running()
                    await set_within(self._in_flight.quiet, ABORT_AGAIN_S)
        except TimeoutError:
            raise VllmAway(f"{self._in_flight.running} requests have not ended") from None

    async def run(self) -> None:
        """Find out whether an earlier sidecar has left vLLM paused. Continue generation where that failed. Runs until
        it is cancelled."""
        await self._find_pause()
        while True:
            await self._resume_later.wait()
            async with self._order:
                if self.mode is not None or self._holds:
                    self._resume_later.clear()  # somebody else continues it
                    continue
                try:
                    await self._open()
                    self._resume_later.clear()
                except VllmGone:
                    self._in_flight.opened.set()  # new samples get an error at once
                    self._resume_later.clear()
                except SidecarError:
                    pass  # tried again below
            await asyncio.sleep(RETRY_S)

    async def _find_pause(self) -> None:
        while True:
            async with self._order:
                try:
                    paused = await is_paused(self._vllm)
                except SidecarError:
                    paused = None  # vLLM is still starting
                else:
                    if paused and self.mode is None and not self._holds:
                        logger.warning("vLLM was paused before this sidecar started: it stays so until it is continued")
                        self.mode, self._is_found = PauseMode.IN_PLACE, True
                        self._in_flight.opened.clear()
                    return
            await asyncio.sleep(RETRY_S)

    async def _close(self, mode: str) -> None:
        was_open = self._in_flight.opened.is_set()
        self._in_flight.opened.clear()
        try:
            # By default vLLM throws the caches away, also those of the requests that it freezes
            await self._vllm.call("POST", f"/pause?mode={mode}&clear_cache=false", timeout_s=self._call_s)
        except SidecarError as error:
            if was_open and isinstance(error, NotOffered | Refused):
                self._in_flight.opened.set()
            elif was_open:
                self._resume_later.set()  # vLLM may yet pause, and nobody would continue it
            if isinstance(error, NotOffered):
                raise
            raise VllmAway(f"generation was not paused: {error.message}") from error

    async def _open(self) -> None:
        await self._vllm.call("POST", "/resume", timeout_s=self._call_s)
        self._in_flight.opened.set()
