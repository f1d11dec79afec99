"""An agent learns to call a tool: an unmodified OpenAI client runs in agent sessions, whose exact tokens are trained.

The agent gets a question such as "add 3 and 5" and a calculator. The tiny model has never seen a tool, so it is first
shown a few calls (supervised), until one answer in five or so is a call. From then on it learns from rewards alone.

    python -m skyrl.base.tiny.tools --out tiny-tools
    skyrl serve --base-model tiny-tools --served-model-name tiny
    python examples/agent_rl.py
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import tinker
from openai import AsyncOpenAI
from tinker import types

from skyrl.agents import Agent, AgentServer, Group, Session, collect, run

CALCULATOR: Any = {
    "type": "function",
    "function": {
        "name": "calc",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}
LARGEST = 4
TASKS, GROUP = 8, 8
SHOWN, PASSES = 8, 45
SAMPLING = {"temperature": 1.0, "max_tokens": 80}
WARM_UP, LEARNING_RATE = 5e-3, 1e-3


@dataclass(frozen=True)
class Sum:
    """A question: what is a + b?"""

    a: int
    b: int

    @classmethod
    def draw(cls, rng: random.Random) -> Sum:
        return cls(rng.randint(1, LARGEST), rng.randint(1, LARGEST))

    def messages(self) -> list[Any]:
        return [{"role": "user", "content": f"add {self.a} and {self.b}"}]

    def reward(self, numbers: tuple[int, int] | None, answer: str) -> float:
        """0.5 for a call that the tool accepts, 0.25 for the right `numbers` in it, and 0.25 for the right answer."""
        if numbers is None:
            return 0.0
        return 0.5 + 0.25 * (numbers == (self.a, self.b)) + 0.25 * (answer.strip() == str(self.a + self.b))


async def converse(client: AsyncOpenAI, task: Sum) -> tuple[tuple[int, int] | None, str]:
    """Ask, run the tool if it is called, and ask again. Returns the tool's numbers and the last answer."""
    messages = task.messages()
    said = (await client.chat.completions.create(model="any", messages=messages, tools=[CALCULATOR])).choices[0].message
    calls: list[Any] = said.tool_calls or []
    numbers = accepted([(call.function.name, call.function.arguments) for call in calls])
    if numbers is None:
        return None, said.content or ""
    messages += [
        said.model_dump(include={"role", "content", "tool_calls"}),
        {"role": "tool", "tool_call_id": calls[0].id, "content": str(sum(numbers))},
    ]
    answer = await client.chat.completions.create(model="any", messages=messages, tools=[CALCULATOR])
    return numbers, answer.choices[0].message.content or ""


def accepted(calls: list[tuple[str, str]]) -> tuple[int, int] | None:
    """The numbers of the one call (name and arguments as JSON); None unless it is what the tool accepts."""
    if len(calls) != 1 or calls[0][0] != "calc":
        return None
    try:
        arguments = json.loads(calls[0][1])
        return int(arguments["a"]), int(arguments["b"])
    except (ValueError, TypeError, KeyError):
        return None


async def agent(openai: AsyncOpenAI, session: Session, task: Sum) -> float:
    """`openai` has the connections of all sessions; each session asks with its own key."""
    client = openai.with_options(base_url=session.openai_base_url, api_key=session.key)
    return task.reward(*await converse(client, task))


def demonstration(task: Sum, tokenizer: Any) -> types.Datum:
    """The whole conversation as it should be. The loss counts what the model says."""
    function = {"name": "calc", "arguments": {"a": task.a, "b": task.b}}
    call = {"type": "function", "id": "call", "function": function}
    total = str(task.a + task.b)
    messages = [
        *task.messages(),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call", "content": total},
        {"role": "assistant", "content": total},
    ]

    def rendered(number: int, **options: Any) -> list[int]:
        template = tokenizer.apply_chat_template(messages[:number], tools=[CALCULATOR], tokenize=False, **options)
        return tokenizer.encode(template)

    tokens = rendered(4)
    weights = np.zeros(len(tokens), np.float32)
    for said in (1, 3):
        weights[len(rendered(said, add_generation_prompt=True)) : len(rendered(said + 1)) - 1] = 1  # not the last "\n"
    inputs = {
        "target_tokens": types.TensorData.from_numpy(np.asarray(tokens[1:], np.int64)),
        "weights": types.TensorData.from_numpy(weights[1:]),
    }
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


async def warm_up(trainer: tinker.TrainingClient, rng: random.Random) -> None:
    """Show the model a few calls."""
    tokenizer = trainer.get_tokenizer()
    data = [demonstration(Sum.draw(rng), tokenizer) for _ in range(SHOWN)]
    pending = []
    for _ in range(PASSES):
        pending.append(trainer.forward_backward(data, "cross_entropy"))
        pending.append(trainer.optim_step(types.AdamParams(learning_rate=WARM_UP)))
    results = await asyncio.gather(*pending)
    losses = [result.metrics["loss:sum"] / SHOWN for result in results[0::2]]
    print(f"warm-up: {PASSES} passes over {SHOWN} demonstrations, loss {losses[0]:.1f} to {losses[-1]:.1f}", flush=True)


def table_row(step: int, groups: list[Group[Sum]], datums: int) -> float:
    """Print what a step has given. Returns its mean reward."""
    rewards = np.asarray([reward for group in groups for reward in group.rewards])
    failed = sum(len(group.trajectories) for group in groups) - len(rewards)
    print(
        f"{step:4d}  {rewards.mean():6.3f}  {(rewards >= 0.5).mean():6.0%}  {(rewards == 1).mean():6.0%}  "
        f"{failed:6d}  {datums:6d}",
        flush=True,
    )
    return float(rewards.mean())


async def learn(
    trainer: tinker.TrainingClient, server: AgentServer, agent: Agent[Sum], steps: int
) -> tuple[float, float]:
    """Returns the mean rewards of the first and of the last quarter of the steps."""
    rng = random.Random(0)
    await warm_up(trainer, rng)
    print("step  reward  called   right  failed  datums")
    rewards: list[float] = []
    for step in range(steps):
        policy = await trainer.save_weights_for_sampler(f"step-{step}", ttl_seconds=3600)
        tasks = [Sum.draw(rng) for _ in range(TASKS)]
        groups = await run(server, agent, tasks, group_size=GROUP, model=policy.path, sampling=SAMPLING)
        data = collect(groups)
        rewards.append(table_row(step, groups, len(data)))
        if data:
            passed = trainer.forward_backward(data, "importance_sampling")
            stepped = trainer.optim_step(types.AdamParams(learning_rate=LEARNING_RATE))
            await asyncio.gather(passed, stepped)
    quarter = max(1, steps // 4)
    return float(np.mean(rewards[:quarter])), float(np.mean(rewards[-quarter:]))


async def train(agent: Agent[Sum], description: str) -> int:
    """Read the options, train, and return the exit status: 1 if the reward has not risen."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", default=os.environ.get("TINKER_BASE_URL", "http://127.0.0.1:8000"))
    parser.add_argument("--base-model", default="tiny")
    parser.add_argument("--steps", type=int, default=24)
    options = parser.parse_args()
    api_key = os.environ.get("TINKER_API_KEY", "tml-agent-example")
    with tinker.ServiceClient(base_url=options.base_url, api_key=api_key) as service:
        trainer = await service.create_lora_training_client(base_model=options.base_model, rank=16, seed=0)
        async with AgentServer(options.base_url, api_key) as server:
            first, last = await learn(trainer, server, agent, options.steps)
    print(f"reward {first:.3f} to {last:.3f}")
    return 0 if last > first else 1


async def main() -> int:
    async with AsyncOpenAI(api_key="of the session") as openai:
        return await train(partial(agent, openai), __doc__ or "")


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
