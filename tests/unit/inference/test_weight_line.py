"""The socket by which a worker is asked about its weights without the engine, as the sidecar asks."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from skyrl.inference.sidecar.vllm_weights import LinesBroken, ask_all
from skyrl.inference.vllm_plugin.weights.jobs import Job, Jobs
from skyrl.inference.vllm_plugin.weights.line import Line


def echo(call: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"ok": True, "call": call, **arguments}


@pytest.fixture
def line() -> Iterator[Line]:
    opened = Line(echo)
    yield opened
    opened.close()


async def test_each_worker_answers(line: Line) -> None:
    names = [f"model.layers.{number}.weight" for number in range(20_000)]
    answers = await ask_all((line.address, line.address), "receive", {"names": names}, 10)
    assert answers == [{"ok": True, "call": "receive", "names": names}] * 2


@pytest.mark.parametrize("call", ["apply", "reset_tensors", "weight"])
async def test_a_call_that_the_engine_must_not_run_beside_is_refused(call: str, line: Line) -> None:
    with pytest.raises(LinesBroken):
        await ask_all((line.address,), call, {}, 10)


async def test_a_worker_that_is_gone_is_told_from_one_that_is_slow(line: Line) -> None:
    with pytest.raises(LinesBroken, match="refused"):
        await ask_all((line.address, "skyrl-weights-gone"), "state", {}, 10)
    slow = Line(lambda call, arguments: time.sleep(5) or {})
    with pytest.raises(TimeoutError):
        await ask_all((slow.address,), "state", {}, 0.2)
    slow.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, who alone can become another user")
def test_another_user_gets_no_answer(line: Line) -> None:
    child = os.fork()
    if child == 0:
        os.seteuid(12345)
        with socket.socket(socket.AF_UNIX) as asking:
            asking.connect(f"\0{line.address}")
            asking.settimeout(5)
            try:
                asking.sendall(b'{"call": "state", "arguments": {}}\n')
                os._exit(len(asking.recv(10)))
            except (BrokenPipeError, ConnectionResetError):
                os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


async def test_a_question_for_a_job_waits_for_its_end() -> None:
    jobs, go = Jobs(), threading.Event()

    def work(_: Job) -> dict[str, Any]:
        go.wait(10)
        return {"done": 1}

    number = jobs.start("work", work)
    line = Line(lambda call, arguments: jobs.state(**arguments))
    assert await ask_all((line.address,), "job", {"number": number, "wait_s": 0.05}, 10) == [{"running": True}]
    asked = asyncio.ensure_future(ask_all((line.address,), "job", {"number": number, "wait_s": 10}, 20))
    await asyncio.sleep(0.05)
    go.set()
    assert await asked == [{"running": False, "done": 1}]
    line.close()
