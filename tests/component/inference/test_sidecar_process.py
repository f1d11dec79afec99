"""`skyrl sidecar` as a process: it stops cleanly, and refuses wrong options at once."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import aiohttp
import pytest
from typer.testing import CliRunner

from skyrl.cli.main import app
from skyrl.runtime.processes.ports import free_port
from tests.component.router_world import steps, until
from tests.component.sidecar_world import FakeVllm, answers, choice, completion


async def test_sigterm_lets_samples_end_and_leaves_nothing() -> None:
    end = asyncio.Event()
    vllm = FakeVllm(steps(end, answers(completion(choice([8])))))
    await vllm.start()
    port = free_port()
    keys = {"SKYRL_VLLM_API_KEY": "secret", "SKYRL_ADMIN_KEY": "admin"}
    command = [sys.executable, "-m", "skyrl.cli.main", "sidecar", "--port", str(port), "--vllm-url", vllm.url + "/"]
    process = await asyncio.create_subprocess_exec(*command, env=os.environ | keys)
    url = f"http://127.0.0.1:{port}"

    async def is_healthy(session: aiohttp.ClientSession) -> bool:
        assert process.returncode is None
        try:
            async with session.get(f"{url}/health") as answer:
                return answer.status == 200
        except aiohttp.ClientConnectorError:
            return False

    try:
        async with aiohttp.ClientSession() as session:
            while not await is_healthy(session):  # noqa: ASYNC110 - a process has no event
                await asyncio.sleep(0.05)
            async with session.post(f"{url}/continue_generation") as refused:
                assert refused.status == 401
            asked = asyncio.create_task(session.post(f"{url}/generate", json={"input_ids": [5, 6, 7]}))
            await until(lambda: bool(vllm.bodies))
            process.send_signal(signal.SIGTERM)
            while await is_healthy(session):  # noqa: ASYNC110 - a process has no event
                await asyncio.sleep(0.01)
            end.set()
            answer = await asked
            assert (await answer.json())["output_ids"] == [8]
        assert await process.wait() == 0
        assert {tuple(request.header("authorization")) for request in vllm.received} == {("Bearer secret",)}
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await vllm.stop()


@pytest.mark.parametrize(
    "options",
    [
        ["--vllm-url", "http://x"],
        ["--port", "30001"],
        ["--port", "0", "--vllm-url", "http://x"],
        ["--port", "30001", "--vllm-url", "127.0.0.1:8000"],
        ["--port", "30001", "--vllm-url", "http://x?a=b"],
    ],
)
def test_wrong_options_are_refused(options: list[str]) -> None:
    result = CliRunner().invoke(app, ["sidecar", *options])
    assert result.exit_code == 2
