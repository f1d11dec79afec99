"""Large training bodies, while one is decompressed and others wait for memory: the process does its other work."""

from __future__ import annotations

import asyncio
import json
import threading

import httpx
import pytest
import zstandard
from api_harness import BASE, LONG_S, Api
from engine_harness import until

from skyrl.api import bodies

BODIES = 3
BODY_BYTES = bodies.MEMORY_BYTES * 2 // 3
"""There is memory for one such body."""


def undecodable(model_id: str, seq_id: int) -> bytes:
    """A pass with readable model and number."""
    fields = {"model_id": model_id, "seq_id": seq_id, "forward_backward_input": "x" * BODY_BYTES}
    return zstandard.compress(json.dumps(fields).encode())


async def test_large_bodies_that_wait_delay_no_heartbeat(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """Accepted, they are decoded only when their turn comes."""
    session = (await api.post("create_session", {})).json()["session_id"]
    wanted = {"session_id": session, "model_seq_id": 0, "base_model": BASE}
    model_id = (await api.post("create_model", wanted)).json()["model_id"]
    begun, go_on = list[int](), threading.Event()
    decompress = bodies._decompress

    def slowly(body: bytes, max_bytes: int) -> bytes:
        begun.append(len(body))
        assert go_on.wait(LONG_S), "the heartbeats waited"
        return decompress(body, max_bytes)

    monkeypatch.setattr(bodies, "_decompress", slowly)

    async def send(seq_id: int) -> httpx.Response:
        headers = {"Content-Type": "application/json", "Content-Encoding": "zstd"}
        return await api.http.post("/api/v1/forward_backward", content=undecodable(model_id, seq_id), headers=headers)

    sending = [asyncio.create_task(send(seq_id)) for seq_id in range(1, BODIES + 1)]
    await until(lambda: bool(begun))
    for _ in range(20):
        assert (await api.post("session_heartbeat", {"session_id": session})).status_code == 200
    assert len(begun) == 1, "the others wait for memory"
    assert not any(task.done() for task in sending)
    go_on.set()
    assert [answer.status_code for answer in await asyncio.gather(*sending)] == [200] * BODIES
