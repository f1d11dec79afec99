"""The examples that train agents with tools, run as processes against a real server, and an answer of that server that
breaks off before the call that it must make."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from skyrl.base.tiny.tools import make
from skyrl.cli.demo.server import DemoServer
from tests.environments import environment
from tests.sdk_programs import TRACED, succeeded
from tests.servers import ready

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1800)]

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
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=1500, check=False)
    assert succeeded(done.returncode, done.stderr), f"{done.returncode}: {done.stdout}{done.stderr}"
    rewards = re.search(r"reward ([\d.]+) to ([\d.]+)", done.stdout)
    assert rewards is not None, done.stdout
    first, last = map(float, rewards.groups())
    assert last > first + 0.05, done.stdout


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("in_session", [False, True])
def test_an_answer_that_ends_before_its_call_has_called_nothing(
    with_tools: DemoServer, stream: bool, in_session: bool
) -> None:
    with httpx.Client(base_url=with_tools.url, headers={"X-API-Key": "tml-a"}, trust_env=False, timeout=60) as client:
        made = client.post("/api/v1/agent_sessions", json={"model": "tiny"}).raise_for_status().json()
        key = made["key"] if in_session else "tml-a"
        openai = OpenAI(base_url=f"{with_tools.url}/v1", api_key=key, max_retries=0)
        function: Any = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
        asked: Any = {"model": "tiny", "messages": [{"role": "user", "content": "Add."}], "stop": ['"name"']}
        tools: Any = {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}
        answer: Any = openai.chat.completions.create(**asked, **tools, stream=stream)
        if stream:
            choices = [choice for chunk in answer for choice in chunk.choices]
            assert [choice.delta.tool_calls for choice in choices if choice.delta.tool_calls] == []
            finish = choices[-1].finish_reason
        else:
            assert not answer.choices[0].message.tool_calls
            finish = answer.choices[0].finish_reason
        assert finish == "stop"
        if in_session:
            turns = client.get(f"/api/v1/agent_sessions/{made['session_id']}/turns").json()["rows"]
            assert [turn["finish_reason"] for turn in turns] == ["stop"]
