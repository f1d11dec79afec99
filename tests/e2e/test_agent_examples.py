"""The examples that train agents with tools, run as processes against a real server."""

from __future__ import annotations

import json
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


def test_the_training_client_of_verifiers_gets_tokens_and_logprobs(with_tools: DemoServer) -> None:
    """It renders chats itself and sends token ids, with `token_id:` names and finite logprobs as its conditions."""
    model = str(with_tools.state_dir.parent / "model")
    command = [environment(VERIFIERS), "-m", "tests.e2e.verifiers_client", with_tools.url, "tiny", model]
    env = os.environ | {"PYTHONPATH": str(EXAMPLES.parent), "SKYRL_KEY": "tml-verifiers"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    turns = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(turns) == 2
    for prompt, sampled, logprobs in turns:
        assert prompt
        assert 0 < len(sampled) == len(logprobs) <= 6
        assert max(logprobs) <= 0.0
    assert len(turns[1][0]) > len(turns[0][0])


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
