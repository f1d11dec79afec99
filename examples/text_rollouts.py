"""Multi-turn GRPO on texts: an agent that sends and reads only text samples from `skyrl rollout`, and a trainer behind
`skyrl serve` learns from the exact tokens.

Each trajectory has two questions: the second is asked after the answer to the first. The agent sends texts to
`POST /generate`. The radix cache behind that route keeps the tokens of every sample; `POST /retrieve_from_text` gives
the whole trajectory as tokens, masks and logprobs. After each step the new adapter is loaded into every engine under a
name of its own.

    skyrl rollout --num-engines 2 --middleware radix    # samples, on port 30000
    skyrl serve                                         # trains, on port 8000
    python examples/text_rollouts.py
"""

from __future__ import annotations

import argparse
import asyncio
import io
import os
import random
import tarfile
import tempfile
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import tinker
from tinker import types

from skyrl.base.tiny.corpus import IM_END, TASKS, Task, chat_prompt

QUESTIONS, GROUP, UPDATES = 4, 16, 2
MAX_NEW_TOKENS = 32


@dataclass
class Rollout:
    """The answers to both questions: the text of the whole conversation, and its reward."""

    text: str
    reward: float


class Plane:
    """The rollout plane. `policy` is the adapter that samples."""

    def __init__(self, url: str, client: httpx.AsyncClient) -> None:
        self._url = url
        self._client = client
        self.policy = ""

    async def post(self, path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> httpx.Response:
        answer = await self._client.post(self._url + path, json=body, headers=headers)
        if answer.status_code != 200:
            raise RuntimeError(f"{path}: {answer.status_code} {answer.text}")
        return answer

    async def use(self, name: str, directory: Path) -> None:
        """Load an adapter into every engine, sample from it from now on, and unload the one before."""
        await self.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(directory)})
        await self.unload()
        self.policy = name

    async def unload(self) -> None:
        """Unload the adapter that samples, if there is one."""
        if self.policy:
            await self.post("/v1/unload_lora_adapter", {"lora_name": self.policy})
            self.policy = ""

    async def generate(self, text: str, seed: int, session: str) -> str:
        """The text that the policy samples after `text`, without the end token. The turns of one session are sampled by
        one engine, which has the keys and values of the turns before."""
        params = {"temperature": 1.0, "max_new_tokens": MAX_NEW_TOKENS, "sampling_seed": seed}
        body = {"text": text, "sampling_params": params, "lora_path": self.policy, "return_logprob": True}
        return (await self.post("/generate", body, {"X-SMG-Routing-Key": session})).json()["text"]

    async def tokens_of(self, text: str) -> tuple[list[int], list[int], list[float]]:
        """Tokens, loss mask (1: sampled) and logprobs (0.0: not sampled) of a whole trajectory; equally long lists."""
        found = (await self.post("/retrieve_from_text", {"text": text})).json()
        return found["tokens"], found["loss_mask"], found["rollout_logp"]


async def converse(plane: Plane, task: Task, questions: list[tuple[str, Any]], seed: int) -> Rollout:
    """Ask one question after the other in one conversation. The reward is the mean of the answers' rewards. Turn i is
    sampled with the seed `seed + i`."""
    text, rewards, session = "", [], str(uuid.uuid4())
    for number, (question, state) in enumerate(questions):
        text += (f"{IM_END}\n" if number else "") + chat_prompt(question)
        answer = await plane.generate(text, seed + number, session)
        rewards.append(task.reward(state, answer))
        text += answer
    return Rollout(text, float(np.mean(rewards)))


async def group_data(plane: Plane, rollouts: list[Rollout]) -> list[types.Datum]:
    """Data for the ppo loss: the advantage is the reward, normalised in the group, on sampled tokens alone."""
    rewards = np.asarray([rollout.reward for rollout in rollouts])
    if rewards.std() == 0:
        return []  # no rollout is better than the others
    data = []
    for rollout, advantage in zip(rollouts, (rewards - rewards.mean()) / rewards.std(), strict=True):
        tokens, mask, logprobs = await plane.tokens_of(rollout.text)
        inputs = {
            "target_tokens": types.TensorData.from_numpy(np.asarray(tokens[1:], np.int64)),
            "logprobs": types.TensorData.from_numpy(np.asarray(logprobs[1:], np.float32)),
            "advantages": types.TensorData.from_numpy(np.asarray(mask[1:], np.float32) * np.float32(advantage)),
        }
        data.append(types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs))
    return data


def largest_gap(data: list[types.Datum], trained: types.ForwardBackwardOutput) -> float:
    """The largest difference between the trainer's and the sampler's logprob of a sampled token."""
    gaps = []
    for datum, output in zip(data, trained.loss_fn_outputs, strict=True):
        sampled = datum.loss_fn_inputs["logprobs"].to_numpy()
        gaps.append(np.abs(np.where(sampled == 0, 0, output["logprobs"].to_numpy() - sampled)).max())
    return float(np.max(gaps))


async def download(client: httpx.AsyncClient, base_url: str, api_key: str, path: str, directory: Path) -> Path:
    """Unpack the adapter of a saved version (`path` is its tinker:// path) into `directory`."""
    run, kind, name = path.removeprefix("tinker://").split("/")
    route = f"{base_url}/api/v1/training_runs/{run}/checkpoints/{kind}/{name}/archive"
    answer = await client.get(route, headers={"X-API-Key": api_key, "Accept": "application/json"})
    answer.raise_for_status()
    archive = await client.get(answer.json()["url"])
    archive.raise_for_status()
    with tarfile.open(fileobj=io.BytesIO(archive.content)) as opened:
        opened.extractall(directory, filter="data")
    return directory


async def run(service: tinker.ServiceClient, options: argparse.Namespace, api_key: str, adapters: Path) -> None:
    task, rng = TASKS["count"], random.Random(0)
    trainer = await service.create_lora_training_client(base_model=options.base_model, rank=8, seed=0)
    async with httpx.AsyncClient(timeout=600, follow_redirects=True, trust_env=False) as client:
        plane = Plane(options.rollout_url, client)
        for step in range(options.steps):
            saved = await trainer.save_weights_for_sampler(f"step-{step}", ttl_seconds=3600)
            name = f"policy-{os.getpid()}-{step}"
            await plane.use(name, await download(client, options.base_url, api_key, saved.path, adapters / name))
            groups = []
            for _ in range(QUESTIONS):
                questions = [task.prompt(rng), task.prompt(rng)]
                seeds = [rng.randrange(2**31) for _ in range(GROUP)]
                groups.append(asyncio.gather(*(converse(plane, task, questions, seed) for seed in seeds)))
            groups = await asyncio.gather(*groups)
            data = [datum for group in groups for datum in await group_data(plane, group)]
            reward = np.mean([rollout.reward for group in groups for rollout in group])
            print(f"step {step:3d}  reward {reward:.3f}", end="", flush=True)
            if data:
                pending = []
                for _ in range(UPDATES):
                    pending.append(trainer.forward_backward(data, "ppo"))
                    pending.append(trainer.optim_step(types.AdamParams(learning_rate=2e-3)))
                results = await asyncio.gather(*pending)
                print(f"  gap {largest_gap(data, results[0]):.1e}", end="")
            print(flush=True)
        await plane.unload()  # its directory ends with this program


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", default=os.environ.get("TINKER_BASE_URL", "http://127.0.0.1:8000"))
    parser.add_argument("--rollout-url", default="http://127.0.0.1:30000", help="the router of `skyrl rollout`")
    parser.add_argument("--base-model", default="tiny")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    api_key = os.environ.get("TINKER_API_KEY", "tml-text-rollouts-example")
    # The engines read an adapter again whenever they need it, so the directory stays until the end
    with (
        tempfile.TemporaryDirectory(prefix="adapters-") as adapters,
        tinker.ServiceClient(base_url=options.base_url, api_key=api_key) as service,
    ):
        asyncio.run(run(service, options, api_key, Path(adapters)))


if __name__ == "__main__":
    main()
