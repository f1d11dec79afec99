"""The client for agent sessions, on the real server: unmodified SDKs as agents, and their trajectories as data."""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import AsyncIterator

import numpy as np
import pytest
from openai import AsyncOpenAI

from skyrl.agents import AgentServer, Command, Finished, Progress, RequestRefused, Session, collect, run
from skyrl.cli.demo.server import DemoServer

from .conftest import ClientFactory

pytestmark = pytest.mark.vllm

KEY = "tml-agent-client"


@pytest.fixture
async def agents(server: DemoServer) -> AsyncIterator[AgentServer]:
    async with AgentServer(server.url, KEY) as client:
        yield client


async def ask(session: Session, *texts: str) -> str:
    """Ask one question after the other in one conversation. Returns the last answer."""
    messages, said = [], ""
    async with AsyncOpenAI(base_url=session.openai_base_url, api_key=session.key) as client:
        for text in texts:
            messages.append({"role": "user", "content": text})
            answer = await client.chat.completions.create(model="any", messages=messages, max_tokens=6)
            said = answer.choices[0].message.content or ""
            messages.append({"role": "assistant", "content": said})
    return said


async def test_groups_of_trajectories_are_data_that_trains(agents: AgentServer, connect: ClientFactory) -> None:
    rewards = itertools.count()  # no two of a group are equal, as those of the tiny model's answers may be

    async def agent(session: Session, task: str) -> float:
        await ask(session, task, "And at night?")
        return float(next(rewards))

    seen: list[str] = []
    groups = await run(
        agents,
        agent,
        ["Who watches the river?", "Where is the fox?"],
        group_size=4,
        concurrency=3,
        on_progress=lambda progress: seen.append(str(progress)),
        model="tiny",
        sampling={"temperature": 1.0},
    )
    assert [group.task for group in groups] == ["Who watches the river?", "Where is the fox?"]
    assert len({each.session_id for group in groups for each in group.trajectories}) == 8
    assert seen[-1].startswith("8/8 sessions, 0 running, mean reward ")
    data = collect(groups)
    assert len(data) >= 6, "of 8 rows, only one in the middle of its group may have the mean reward"
    trainer = connect(KEY).create_lora_training_client(base_model="tiny", rank=4, seed=0).result()
    outputs = trainer.forward_backward(data, "importance_sampling").result().loss_fn_outputs
    for datum, output in zip(data, outputs, strict=True):
        inputs = {name: tensor.to_numpy() for name, tensor in datum.loss_fn_inputs.items()}
        trained = inputs["advantages"] != 0
        assert trained.any()
        np.testing.assert_allclose(output["logprobs"].to_numpy()[trained], inputs["logprobs"][trained], atol=0.05)


async def test_a_failed_agent_has_no_reward_and_its_session_ends(agents: AgentServer) -> None:
    async def agent(session: Session, task: int) -> float:
        sessions.append(session)
        await ask(session, "Where is the fox?")
        if len(sessions) == 2:
            raise ValueError("the tool is broken")
        return 1.0

    sessions: list[Session] = []
    (group,) = await run(agents, agent, [0], group_size=3, concurrency=1, model="tiny")
    assert [each.reward for each in group.trajectories] == [1.0, None, 1.0]
    assert [each.error for each in group.trajectories] == [None, "ValueError: the tool is broken", None]
    assert [len(each.rows) for each in group.trajectories] == [1, 0, 1]
    for session in sessions:
        with pytest.raises(Exception, match="ended"):
            await ask(session, "Where is the fox?")


async def test_an_agent_that_the_server_has_failed_is_run_again_in_a_new_session(agents: AgentServer) -> None:
    async def agent(session: Session, task: int) -> float:
        sessions.append(session.id)
        if len(sessions) < 3:
            raise ConnectionResetError("the agent's connection broke")
        return 1.0

    sessions: list[str] = []
    reports: list[Progress] = []
    (group,) = await run(agents, agent, [0], on_progress=reports.append, model="tiny")
    assert group.trajectories[0].session_id == sessions[2]
    assert len(set(sessions)) == 3
    assert reports[-1].retried == 2
    sessions.clear()
    (group,) = await run(agents, agent, [0], retries=1, model="tiny")
    assert group.trajectories[0].error == "ConnectionResetError: the agent's connection broke"


async def test_a_cancelled_run_ends_its_sessions(agents: AgentServer) -> None:
    async def agent(session: Session, task: int) -> float:
        sessions.append(session)
        if len(sessions) == 3:
            begun.set()
        await asyncio.Event().wait()
        return 1.0

    sessions: list[Session] = []
    begun = asyncio.Event()
    running = asyncio.create_task(run(agents, agent, range(9), concurrency=3, model="tiny"))
    await begun.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert len(sessions) == 3
    for session in sessions:
        with pytest.raises(Exception, match="ended"):
            await ask(session, "Where is the fox?")


async def test_a_model_that_does_not_exist_ends_the_run(agents: AgentServer) -> None:
    async def agent(session: Session, task: int) -> float:
        return 1.0

    with pytest.raises(RequestRefused, match="404"):
        await run(agents, agent, [0, 1], model="none")


PROGRAM = """
import anthropic
answer = anthropic.Anthropic().messages.create(
    model="any", max_tokens=6, messages=[{"role": "user", "content": "Where is the fox?"}]
)
print(len(answer.content[0].text))
"""


async def test_a_command_with_an_anthropic_client_is_an_agent(agents: AgentServer) -> None:
    async def reward(task: str, finished: Finished) -> float:
        return float(finished.output.split()[-1])

    agent = Command[str](lambda program: [sys.executable, "-c", program], reward, timeout_s=120)
    (group,) = await run(agents, agent, [PROGRAM], group_size=2, model="tiny")
    for trajectory in group.trajectories:
        assert trajectory.error is None
        assert trajectory.reward is not None
        (row,) = trajectory.rows
        assert 0 < row.mask.sum() <= 6


async def test_turns_and_every_form_of_a_trajectory_can_be_read(agents: AgentServer) -> None:
    async with await agents.session(model="tiny", name="read", metadata={"split": "train"}) as session:
        await ask(session, "Where is the fox?", "And at night?")
        await session.reward(0.5)
    assert len(await session.turns()) == 2
    assert len(await session.trajectory("jsonl")) == 2
    (datum,) = await session.trajectory()
    assert set(datum["loss_fn_inputs"]["advantages"]["data"]) == {0.0, 0.5}
    (sample,) = await session.trajectory("samples")
    assert sample["reward"] == 0.5
    assert sample["metadata"]["split"] == "train"
    assert (await session.trajectory("verl"))[0]["input_ids"] == sample["tokens"]
