"""Calls to the worker extension inside vLLM, which stages, applies and checks weights. Each rank answers each call.

The first call goes through vLLM's engine, and so do those that the engine must not run beside. All others go to the
sockets that the workers have opened, without the engine, or through the engine where these cannot be reached. See the
plugin's `line`.

Knows the extension's calls; knows nothing of SGLang's routes."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import msgspec

from skyrl.inference.sidecar.errors import (
    BadRequest,
    Busy,
    NotOffered,
    SidecarError,
    VllmAway,
    VllmBroke,
    VllmInterrupted,
)
from skyrl.inference.sidecar.vllm import Vllm
from skyrl.inference.vllm_plugin.weights.line import ENGINE_CALLS, MAX_LINE


class LinesBroken(Exception):
    """A worker cannot be asked so: it has ended, or has another network namespace or another user."""


async def ask_all(
    addresses: tuple[str, ...], call: str, arguments: dict[str, Any], timeout_s: float
) -> list[dict[str, Any]]:
    """The answer of each worker. Raises LinesBroken, TimeoutError."""
    request = msgspec.json.encode({"call": call, "arguments": arguments}) + b"\n"
    async with asyncio.timeout(timeout_s):
        return list(await asyncio.gather(*(_ask(address, request) for address in addresses)))


async def _ask(address: str, request: bytes) -> dict[str, Any]:
    try:
        reader, writer = await asyncio.open_unix_connection(f"\0{address}", limit=MAX_LINE)
        try:
            writer.write(request)
            await writer.drain()
            return msgspec.json.decode(await reader.readuntil(b"\n"), type=dict[str, Any])
        finally:
            writer.close()
    except (OSError, EOFError, asyncio.LimitOverrunError, msgspec.DecodeError) as error:
        raise LinesBroken(f"{address}: {str(error) or type(error).__name__}") from error


logger = logging.getLogger(__name__)

METHOD = "skyrl_weights"
NO_EXTENSION = (
    "vLLM was started without --worker-extension-cls skyrl.inference.vllm_plugin.weights.worker.WeightUpdates; "
    "`skyrl rollout` starts it so"
)
FIRST_POLL_S, LAST_POLL_S = 0.005, 0.2
"""Between two questions for the state of a job through the engine. Each waits for the engine's present step."""
WAIT_S = 1.0
"""How long a worker that is asked without the engine waits for the end of a job."""

Ranks = list[dict[str, Any]]


class VllmWeights:
    """`call_s` bounds a call that returns at once; a call waits for the end of vLLM's present step."""

    def __init__(self, vllm: Vllm, call_s: float) -> None:
        self._vllm = vllm
        self._call_s = call_s
        self._lines: tuple[str, ...] = ()
        """Where the workers of the present vLLM answer without its engine; empty if that is not known."""

    async def call(self, name: str, arguments: dict[str, Any] | None = None) -> Ranks:
        """The answer of each rank. Raises BadRequest when a rank refuses, Busy when another call still runs,
        NotOffered, and VllmAway or VllmBroke when vLLM fails."""
        ranks = await self.outcomes(name, arguments)
        if (refused := refusal(ranks)) is not None:
            raise refused
        return ranks

    async def outcomes(
        self, name: str, arguments: dict[str, Any] | None = None, timeout_s: float | None = None
    ) -> Ranks:
        """As `call`, for a caller that must know which ranks refused: those have `ok` false."""
        timeout_s = timeout_s or self._call_s
        if self._lines and name not in ENGINE_CALLS:
            waits = {"wait_s": WAIT_S} if name == "job" else {}  # through the engine it would stop the engine
            try:
                return await ask_all(self._lines, name, (arguments or {}) | waits, timeout_s)
            except LinesBroken as error:
                logger.info("vLLM's workers are asked through the engine: %s", error)
                self._lines = ()
            except TimeoutError:
                raise VllmAway(f"a worker of vLLM did not answer {name} within {timeout_s:g} s") from None
        return await self._through_engine(name, arguments or {}, timeout_s)

    async def _through_engine(self, name: str, arguments: dict[str, Any], timeout_s: float) -> Ranks:
        body = {"method": METHOD, "args": [name, arguments]}
        try:
            answer = await self._vllm.call("POST", "/collective_rpc", body, timeout_s)
        except VllmInterrupted as error:
            if METHOD in error.message:
                raise NotOffered(NO_EXTENSION) from error
            raise
        ranks = answer.get("results") if isinstance(answer, dict) else None
        if not isinstance(ranks, list) or not ranks or not all(isinstance(rank, dict) for rank in ranks):
            raise VllmBroke("vLLM's /collective_rpc answered no results")
        lines = tuple(rank["line"] for rank in ranks if rank.get("line"))
        self._lines = lines if len(lines) == len(ranks) else ()
        return ranks

    async def job(self, name: str, arguments: dict[str, Any] | None, timeout_s: float) -> Ranks:
        """Start a job, and wait for its end. After `timeout_s`, and when this is cancelled, the job is told to stop.
        Raises as `call`."""
        started = await self.outcomes(name, arguments)
        if (refused := refusal(started)) is not None:
            if any(rank.get("ok") is True for rank in started):
                await self._stop()
            raise refused
        try:
            async with asyncio.timeout(timeout_s):
                return await self._until_ended([rank["job"] for rank in started])
        except TimeoutError:
            await self._stop()
            raise BadRequest(f"it took longer than {timeout_s:g} s") from None
        except asyncio.CancelledError:
            await asyncio.shield(self._stop())
            raise

    async def _until_ended(self, numbers: list[int]) -> Ranks:
        """`numbers`: of each rank's job. A rank that refused a job counts one less from then on."""
        pause_s = FIRST_POLL_S
        while True:
            ranks = await self.call("job", {"numbers": numbers})
            if not any(rank.get("running") for rank in ranks):
                return ranks
            if not self._lines:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LAST_POLL_S)

    async def _stop(self) -> None:
        try:
            await self.call("stop")
        except SidecarError:
            return  # vLLM is gone, and the job with it


def longest(ranks: Ranks) -> dict[str, float]:
    """The seconds of each stage, of the rank that took longest for it."""
    found: dict[str, float] = {}
    for rank in ranks:
        for stage, seconds in rank.get("seconds", {}).items():
            found[stage] = max(seconds, found.get(stage, 0.0))
    return found


def rank_results(ranks: Ranks) -> list[dict[str, Any]]:
    """The outcome of each rank, for the client: `{"rank", "success", "message", "error"}`, `error` null for success."""
    errors = [rank.get("broken") if rank.get("ok") is True else str(rank.get("error")) for rank in ranks]
    return [
        {"rank": number, "success": error is None, "message": error or "ok", "error": error}
        for number, error in enumerate(errors)
    ]


def refusal(ranks: Ranks) -> SidecarError | None:
    """The error of the first rank that refused; None if none did."""
    for number, rank in enumerate(ranks):
        if rank.get("ok") is not True:
            error = _refusal(rank, f"rank {number}: " if len(ranks) > 1 else "")
            error.rank_results = rank_results(ranks)
            return error
    return None


def _refusal(rank: dict[str, Any], where: str) -> SidecarError:
    message = f"{where}{rank.get('error')}"
    match rank.get("status"):
        case 409:
            return Busy(message)
        case 501:
            return NotOffered(message)
        case 500:
            return VllmBroke(message)
        case _:
            return BadRequest(message)
