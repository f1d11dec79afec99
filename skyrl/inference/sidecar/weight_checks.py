"""Proofs of which weights one vLLM has: checksums, single rows, and random numbers that an update must replace."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

from skyrl.inference.sidecar.errors import BadRequest, Busy, NotOffered
from skyrl.inference.sidecar.vllm_weights import Ranks, VllmWeights
from skyrl.inference.sidecar.weight_trouble import WeightTrouble


class WeightChecks:
    """In the body of `present()` the weights are there, and nobody else changes them. `update_s` bounds each check."""

    def __init__(
        self,
        present: Callable[[], AbstractAsyncContextManager[None]],
        weights: VllmWeights,
        trouble: WeightTrouble,
        update_s: float,
    ) -> None:
        self._present = present
        self._weights = weights
        self._trouble = trouble
        self._update_s = update_s

    async def reset(self) -> Ranks:
        """Overwrite the weights with random numbers. Nobody can sample until a full update. Raises SidecarError."""
        async with self._present():
            hold = await self._trouble.enter_hold()
            try:
                ranks = await self._weights.call("reset_tensors")
            except BaseException as error:
                if not isinstance(error, (BadRequest, Busy, NotOffered)):  # it may have begun
                    self._trouble.reason = "its tensors were perhaps reset by /weights_checker"
                await self._trouble.leave_hold(hold)
                raise
            self._trouble.reason = "its tensors were reset by /weights_checker"
            await self._trouble.leave_hold(hold)
            return ranks

    async def check(self, action: str) -> Ranks:
        """`checksum`, `snapshot` or `compare`, on each rank. Raises SidecarError."""
        async with self._present():
            return await self._weights.job(action, None, self._update_s)

    async def rows(self, name: str, most: int) -> Any:
        """The first `most` rows of a tensor, as lists of numbers. Raises SidecarError."""
        async with self._present():
            return (await self._weights.call("weight", {"name": name, "most": most}))[0]["rows"]
