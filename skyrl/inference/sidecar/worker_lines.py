"""Asks the workers of a vLLM by the sockets that they open for it, without the engine. See the plugin's `line`."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from skyrl.inference.vllm_plugin.weights.line import MAX_LINE


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
