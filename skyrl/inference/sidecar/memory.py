"""SGLang's routes that give a vLLM's device memory away, to a trainer on the same devices, and take it back.

Knows vLLM's sleep mode; knows nothing of weights. On a CPU nothing is freed, and the routes answer as on a GPU.
"""

from __future__ import annotations

import contextlib
from typing import Any

from skyrl.inference.sidecar.call import Call
from skyrl.inference.sidecar.errors import BadRequest, NotOffered, SidecarError
from skyrl.inference.sidecar.in_flight import InFlight
from skyrl.inference.sidecar.parameters import parameters
from skyrl.inference.sidecar.pause import Hold, Pause
from skyrl.inference.sidecar.updates import Updates
from skyrl.inference.sidecar.vllm import Vllm
from skyrl.inference.sidecar.vllm_config import KnownConfig

WEIGHTS, CACHE = "weights", "kv_cache"
TAGS = (WEIGHTS, CACHE)
TIMEOUT_S = 120.0
NO_SLEEP_MODE = "vLLM was started without --enable-sleep-mode, and would free no memory"


class Memory:
    """Generation is held while anything is released."""

    def __init__(self, vllm: Vllm, config: KnownConfig, in_flight: InFlight, pause: Pause, updates: Updates) -> None:
        self._vllm = vllm
        self._config = config
        self._in_flight = in_flight
        self._pause = pause
        self._updates = updates
        self._released: set[str] = set()
        self._hold: Hold | None = None

    async def release(self, call: Call) -> None:
        """New samples wait from now on, until all memory is back. Samples in flight are refused, as SGLang refuses
        them: their client would wait, and their cache would be lost. Raises SidecarError."""
        tags = _tags(await parameters(call))
        self._check_quiet()
        on_cpu = await self._config.device() == "cpu"
        if not on_cpu and (await self._config.get()).get("enable_memory_saver") is False:
            raise NotOffered(NO_SLEEP_MODE)
        async with self._updates.locked():
            if self._hold is None:
                self._hold = await self._pause.hold()
            try:
                self._check_quiet()
                await self._give_away(tags - self._released, on_cpu=on_cpu)
            except SidecarError:
                await self._continue_unless_released()
                raise

    async def resume(self, call: Call) -> None:
        """Generation goes on when all memory is back, unless it was paused by hand. Raises SidecarError."""
        tags = _tags(await parameters(call))
        async with self._updates.locked():
            if not self._released and not self._in_flight.quiet.is_set():
                return  # nothing is released. vLLM's /wake_up would continue samples that are frozen
            rest = self._released - tags
            # vLLM ignores the whole call if one of its tags is not released
            for query in [f"?tags={tag}" for tag in sorted(tags & self._released)] if rest else [""]:
                await self._vllm.call("POST", f"/wake_up{query}", timeout_s=TIMEOUT_S)
            self._released = rest
            self._updates.weights_away = WEIGHTS in rest
            await self._continue_unless_released()

    async def _give_away(self, tags: set[str], *, on_cpu: bool) -> None:
        if WEIGHTS in tags:
            # vLLM gives the cache away, too: without the weights nothing is computed into it
            await self._vllm.call("POST", "/sleep?level=1&mode=abort", timeout_s=TIMEOUT_S)
            self._updates.weights_away = True
        elif tags and WEIGHTS not in self._released and not on_cpu:  # on a CPU vLLM fails
            try:
                await self._vllm.call("POST", "/release_kv_cache_memory", timeout_s=TIMEOUT_S)
            except SidecarError:
                with contextlib.suppress(SidecarError):  # vLLM takes the cache for released, also where that failed
                    await self._vllm.call("POST", f"/wake_up?tags={CACHE}", timeout_s=TIMEOUT_S)
                raise
        self._released |= tags

    async def _continue_unless_released(self) -> None:
        if not self._released and self._hold is not None:
            hold, self._hold = self._hold, None
            await self._pause.let_go(hold)

    def _check_quiet(self) -> None:
        if not self._in_flight.quiet.is_set():
            raise BadRequest(
                f"{self._in_flight.running} requests are in flight: wait for them, or end them with /pause_generation"
            )


def _tags(given: dict[str, Any]) -> set[str]:
    tags = given.get("tags")
    if tags is None:
        return set(TAGS)
    if not isinstance(tags, list) or not tags or any(tag not in TAGS for tag in tags):
        raise BadRequest(f"tags: must be null or a list of {', '.join(TAGS)}, got {tags!r}")
    return set(tags)
