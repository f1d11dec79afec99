"""The run of agent_rl.py with `verifiers` as the environment: its task gives the reward, and its agent runs between an
interception server of verifiers and the session.

verifiers 0.4 needs an older `openai` than this repository's tests, so it has a Python environment of its own:

    python -m venv agents && agents/bin/pip install -r requirements/agents-verifiers.txt
    PYTHONPATH=. agents/bin/python examples/agent_rl_verifiers.py     # the server as for agent_rl.py
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import asyncio
import os
import sys
from functools import partial
from typing import Any

import verifiers.v1 as vf
from agent_rl import Sum, accepted, converse, train
from openai import AsyncOpenAI
from verifiers.v1.interception import InterceptionServer

from skyrl.agents import Session

__all__ = ["Calculator"]


class SumData(vf.TaskData):
    a: int
    b: int


class SumTask(vf.Task[SumData]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        said = [message for message in trace.branches[-1].messages if message.role == "assistant"]
        numbers = accepted([(call.name, call.arguments) for call in said[0].tool_calls or []])
        return Sum(self.data.a, self.data.b).reward(numbers, said[-1].content or "")


class Calculator(vf.Harness[vf.HarnessConfig]):
    """The agent's loop, in this process. It asks the interception of verifiers, which asks the session."""

    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self, ctx: Any, trace: vf.Trace, runtime: Any, endpoint: str, secret: str, mcp_urls: dict[str, str], data: Any
    ) -> vf.ProgramResult:
        async with AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
            await converse(client, Sum(data.a, data.b))
        return vf.ProgramResult(0, "", "")


async def agent(interception: InterceptionServer, session: Session, task: Sum) -> float:
    """Raises RuntimeError with the errors of verifiers."""
    variable = f"KEY_{session.id}"  # verifiers takes a client's key from the environment alone
    os.environ[variable] = session.key
    try:
        player = vf.Agent(
            vf.AgentConfig(
                harness=vf.HarnessConfig(id="agent_rl_verifiers"),  # this file
                model="any",
                client=vf.EvalClientConfig(base_url=session.openai_base_url, api_key_var=variable),
                runtime=vf.SubprocessConfig(),
            ),
            interception=interception,
        )
        prompt = task.messages()[0]["content"]
        trace = await player.run(SumTask(SumData(a=task.a, b=task.b, prompt=prompt)))
    finally:
        del os.environ[variable]
    if not trace.ok:
        raise RuntimeError(f"verifiers: {trace.errors}")
    return trace.reward


async def main() -> int:
    async with InterceptionServer() as interception:
        return await train(partial(agent, interception), __doc__ or "")


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
