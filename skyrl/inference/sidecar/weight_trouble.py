"""Whether the weights of one vLLM are whole. While they are not, generation is held."""

from __future__ import annotations

import contextlib
import logging

from skyrl.inference.sidecar.errors import SidecarError
from skyrl.inference.sidecar.pause import Hold, Pause
from skyrl.inference.sidecar.vllm_weights import VllmWeights

logger = logging.getLogger(__name__)


class WeightTrouble:
    """All calls but reading `reason` are made by whoever changes the weights, one at a time."""

    def __init__(self, weights: VllmWeights, pause: Pause) -> None:
        self._weights = weights
        self._pause = pause
        self.reason: str | None = None
        """Why nobody may sample from this vLLM; None if the weights are whole."""
        self._kept_hold: Hold | None = None
        """Holds generation while there is a reason."""

    async def enter_hold(self) -> Hold:
        """A hold; that of an update that failed before goes on."""
        if self._kept_hold is not None:
            kept, self._kept_hold = self._kept_hold, None
            return kept
        return await self._pause.hold()

    async def leave_hold(self, hold: Hold) -> None:
        """Continue generation, unless there is a reason not to."""
        if self.reason is None:
            await self._pause.let_go(hold)
        else:
            self._kept_hold = hold
            logger.error("generation is held: %s", self.reason)

    async def take_over(self, reason: str | None) -> None:
        """The reason that an earlier sidecar or a start of vLLM has left; None: the weights are whole. Raises
        SidecarError."""
        if reason == self.reason:
            return
        hold = await self.enter_hold()
        if reason is not None:  # an earlier sidecar may have paused vLLM for it; the next update continues
            self._pause.forget_found()
        self.reason = reason
        await self.leave_hold(hold)

    async def remember(self, reason: str) -> None:
        """An update has broken the weights. vLLM remembers it too, for the next sidecar."""
        self.reason = reason
        with contextlib.suppress(SidecarError):
            await self._weights.call("mark_broken", {"reason": reason})
