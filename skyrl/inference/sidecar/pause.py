"""Pauses of generation: by hand, and by holds, such as for the moment in which weights change.

While generation is paused the gate is closed, so no new sample reaches vLLM. Those that vLLM has are frozen there, or
aborted.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from enum import StrEnum

from skyrl.inference.sidecar.errors import NotOffered, Refused, SidecarError, VllmAway, VllmGone
from skyrl.inference.sidecar.facts import is_paused
from skyrl.inference.sidecar.in_flight import InFlight
from skyrl.inference.sidecar.vllm import Vllm

logger = logging.getLogger(__name__)

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
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(ABORT_AGAIN_S):
                            await self._in_flight.quiet.wait()
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
                    self._in_flight.gate.open()  # new samples get an error at once
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
                        self._in_flight.gate.close()
                    return
            await asyncio.sleep(RETRY_S)

    async def _close(self, mode: str) -> None:
        was_open = self._in_flight.gate.is_open
        self._in_flight.gate.close()
        try:
            # By default vLLM throws the caches away, also those of the requests that it freezes
            await self._vllm.call("POST", f"/pause?mode={mode}&clear_cache=false", timeout_s=self._call_s)
        except SidecarError as error:
            if was_open and isinstance(error, NotOffered | Refused):
                self._in_flight.gate.open()
            elif was_open:
                self._resume_later.set()  # vLLM may yet pause, and nobody would continue it
            if isinstance(error, NotOffered):
                raise
            raise VllmAway(f"generation was not paused: {error.message}") from error

    async def _open(self) -> None:
        await self._vllm.call("POST", "/resume", timeout_s=self._call_s)
        self._in_flight.gate.open()
