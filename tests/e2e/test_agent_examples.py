"""The examples that train agents with tools, run as processes against a real server."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from skyrl.base.tiny.tools import make
from skyrl.cli.demo.server import DemoServer
from tests.environments import environment
from tests.sdk_programs import TRACED, succeeded
from tests.servers import ready

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

EXAMPLES = Path(__file__).parents[2] / "examples"
VERIFIERS = EXAMPLES.parent / "requirements" / "agents-verifiers.txt"
HERMES = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}


@pytest.fixture(scope="module")
def with_tools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DemoServer]:
    directory = tmp_path_factory.mktemp("tools")
    make(directory / "model", context=4096)
    flags = ("--base-model", str(directory / "model"), "--served-model-name", "tiny")
    config = {"generator.inference_engine.engine_init_kwargs": HERMES}
    with ready(DemoServer(directory / "state", *flags, backend_config=config)) as running:
        yield running


@pytest.mark.parametrize("script", ["agent_rl.py", "agent_rl_verifiers.py"])
def test_an_agent_learns_to_call_a_tool(with_tools: DemoServer, script: str) -> None:
    python = environment(VERIFIERS) if script == "agent_rl_verifiers.py" else sys.executable
    command = [python, str(EXAMPLES / script), "--base-url", with_tools.url]
    env = os.environ | TRACED | {"PYTHONPATH": str(EXAMPLES.parent)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500, check=False)
    assert succeeded(done.returncode, done.stderr), f"{done.returncode}: {done.stdout}{done.stderr}"
    rewards = re.search(r"reward ([\d.]+) to ([\d.]+)", done.stdout)
    assert rewards is not None, done.stdout
    first, last = map(float, rewards.groups())
    assert last > first + 0.05, done.stdout
