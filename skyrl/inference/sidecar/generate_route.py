"""`POST|PUT /generate`: reads the body, and writes the answer or the stream of events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from skyrl.inference.sidecar.call import EVENTS, Call, compact, error_body
from skyrl.inference.sidecar.errors import SidecarError
from skyrl.inference.sidecar.generate_request import GenerateRequest, read_generate
from skyrl.inference.sidecar.generation import Generation

DONE = b"data: [DONE]\n\n"


async def generate(call: Call, generation: Generation) -> None:
    """Raises SidecarError if nothing has been answered yet, and ClientLeft."""
    request = read_generate(await call.body())
    if request.stream:
        await call.while_connected(_stream(call, generation, request))
    else:
        await call.answer_json(await call.while_connected(generation.whole(request)))


async def _stream(call: Call, generation: Generation, request: GenerateRequest) -> None:
    """An error before the first chunk is answered with its status: clients take a stream without chunks for a sample
    without tokens."""
    async with aclosing(generation.chunks(request)) as chunks:
        first = await anext(chunks)
        await call.start(200, EVENTS)
        await call.write(_event(first), more=True)
        await _rest(call, chunks)
    await call.write(DONE, more=False)


async def _rest(call: Call, chunks: AsyncGenerator[Any]) -> None:
    try:
        async for chunk in chunks:
            await call.write(_event(chunk), more=True)
            await asyncio.sleep(0)  # let what vLLM has sent meanwhile become one chunk
    except SidecarError as error:
        await call.write(_event(error_body(error)), more=True)


def _event(value: Any) -> bytes:
    return b"data: " + compact(value) + b"\n\n"
