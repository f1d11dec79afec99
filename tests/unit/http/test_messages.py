"""Requests whose client leaves while they are worked on."""

from __future__ import annotations

import asyncio

import pytest

from skyrl.http.messages import Body, ClientLeft, Message


@pytest.mark.parametrize("turns", range(4))
async def test_a_client_that_leaves_as_the_work_ends_cancels_nothing_that_comes_after(turns: int) -> None:
    left = asyncio.Event()

    async def receive() -> Message:
        await left.wait()
        return {"type": "http.disconnect"}

    body = Body(receive, 1)
    body.complete = True
    noticed = False
    try:
        async with body.while_connected():
            await asyncio.sleep(0)
            left.set()
            for _ in range(turns):
                await asyncio.sleep(0)
    except ClientLeft:
        noticed = True
    await asyncio.sleep(0.01)
    assert noticed == (turns >= 2)
