"""The tenants of `unlike_tenants`, each a process of its own that makes steps when it is told to.

Tenants that train use the SDK, agents OpenAI's client. A step's answers get advantages that alternate, so that all of
them train. Knows no server but its URL; what a step may take is for `unlike_tenants`.
"""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import openai
import tinker
from PIL import Image
from tinker import types

from skyrl.base.pictures.vision import VisionConfig

MODEL = "tiny-vision"
LONG = 10_000
SIDE = 1_000
"""Pixels of each side of a picture."""
VISION_START, VISION_END = 512, 513
TOOLS, AGENTS, TURNS = 300, 4, 2
FIRST_WORD, WORDS = 300, 500
"""Token ids of words."""


@dataclass(frozen=True)
class Step:
    """Seconds: to save the weights, to sample, for the pass, and from its result to that of the optimizer step."""

    save_s: float
    sample_s: float
    pass_s: float
    optim_s: float

    @property
    def seconds(self) -> float:
        return self.save_s + self.sample_s + self.pass_s + self.optim_s


@dataclass(frozen=True)
class Rl:
    """A step of RL: `prompts` new prompts, and `group` answers of `tokens` tokens to each. It trains on the answers to
    the first `trained` prompts."""

    prompts: int
    trained: int
    group: int
    tokens: int
    prompt: Callable[[np.random.Generator, str], types.ModelInput]


def _words(count: int) -> Callable[[np.random.Generator, str], types.ModelInput]:
    return lambda chance, model: types.ModelInput.from_ints(chance.integers(FIRST_WORD, WORDS, count).tolist())


def _picture(chance: np.random.Generator, model: str) -> types.ModelInput:
    """A new picture of a megapixel, and a question of 16 tokens."""
    noise, file = Image.fromarray(chance.integers(0, 256, (SIDE // 8, SIDE // 8, 3), np.uint8)), io.BytesIO()
    noise.resize((SIDE, SIDE)).save(file, "JPEG", quality=80)
    count = VisionConfig.of(model).tokens(SIDE, SIDE)
    chunks: list[types.ModelInputChunk] = [
        types.EncodedTextChunk(tokens=[VISION_START]),
        types.ImageChunk(data=file.getvalue(), format="jpeg", expected_tokens=count),
        types.EncodedTextChunk(tokens=[VISION_END, *chance.integers(FIRST_WORD, WORDS, 16).tolist()]),
    ]
    return types.ModelInput(chunks=chunks)


KINDS: dict[str, Rl | None] = {
    "long": Rl(2, 2, 2, 16, _words(LONG)),
    "pictures": Rl(4, 4, 4, 16, _picture),
    "agents": None,
    "tiny": Rl(2, 2, 4, 16, _words(40)),
}


class Trains:
    """A tenant that does RL."""

    def __init__(self, url: str, model: str, kind: str, rl: Rl) -> None:
        self._model, self._rl = model, rl
        self._chance = np.random.default_rng()  # without a seed: a server has seen none of the prompts
        service = tinker.ServiceClient(base_url=url, api_key=f"tml-{kind}")
        self._trainer = service.create_lora_training_client(base_model=MODEL, rank=8, seed=1).result()

    def step(self) -> Step:
        rl, marks = self._rl, list[float]()
        prompts = [rl.prompt(self._chance, self._model) for _ in range(rl.prompts)]
        params = types.SamplingParams(max_tokens=rl.tokens, temperature=1.0, stop=[])
        marks.append(time.perf_counter())
        sampler = self._trainer.save_weights_and_get_sampling_client().result()
        marks.append(time.perf_counter())
        pending = [sampler.sample(prompt, rl.group, params) for prompt in prompts]
        groups = [future.result().sequences for future in pending]
        marks.append(time.perf_counter())
        data = [
            _datum(prompt, list(each.tokens), list(each.logprobs or ()), 1.0 - 2.0 * (number % 2))
            for prompt, group in zip(prompts[: rl.trained], groups, strict=False)
            for number, each in enumerate(group)
        ]
        update = self._trainer.forward_backward(data, "importance_sampling")
        step = self._trainer.optim_step(types.AdamParams(learning_rate=1e-4))
        update.result()
        marks.append(time.perf_counter())
        step.result()
        marks.append(time.perf_counter())
        return Step(*np.diff(marks).tolist())


def _datum(prompt: types.ModelInput, tokens: list[int], logprobs: list[float], advantage: float) -> types.Datum:
    before = [0.0] * (prompt.length - 1)
    last = prompt.chunks[-1]
    assert isinstance(last, types.EncodedTextChunk)
    given = types.EncodedTextChunk(tokens=[*last.tokens, *tokens[:-1]])
    inputs = {
        "target_tokens": np.asarray([*map(int, before), *tokens], np.int64),
        "logprobs": np.asarray([*before, *logprobs], np.float32),
        "advantages": np.asarray([*before, *[advantage] * len(tokens)], np.float32),
    }
    return types.Datum(
        model_input=types.ModelInput(chunks=[*prompt.chunks[:-1], given]),
        loss_fn_inputs={name: types.TensorData.from_numpy(value) for name, value in inputs.items()},
    )


class Agents:
    """A tenant with AGENTS agents at a time, each with TOOLS tools, one of which it must call in each turn."""

    def __init__(self, url: str) -> None:
        self._client = openai.OpenAI(base_url=f"{url}/v1", api_key="tml-agents", timeout=600.0)
        self._number = 0
        self._tools: Any = [tool(number) for number in range(TOOLS)]

    def step(self) -> Step:
        """TURNS turns of each agent."""
        began = time.perf_counter()
        with ThreadPoolExecutor(AGENTS) as pool:
            list(pool.map(self._agent, range(self._number, self._number + AGENTS)))
        self._number += AGENTS
        return Step(0.0, time.perf_counter() - began, 0.0, 0.0)

    def _agent(self, number: int) -> None:
        messages: list[Any] = [{"role": "user", "content": f"count from {number}"}]
        for _ in range(TURNS):
            answer = self._client.chat.completions.create(
                model=MODEL, messages=messages, tools=self._tools, tool_choice="required", max_tokens=32
            )
            said = str(answer.choices[0].message.content or "")
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "and now the next one"}]


def tool(number: int) -> dict[str, Any]:
    fields = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    name, description = f"count_{number}", f"count up from a number in steps of {number}"
    return {"type": "function", "function": {"name": name, "description": description, "parameters": fields}}


def work(told: Connection, url: str, model: str, kind: str) -> None:
    """A tenant of `url`. "go": make steps, and send each, until "stop", then None. `model`: the directory of the base
    model. Sends None also when it has its model. Ends with the other end of the connection."""
    rl = KINDS[kind]
    tenant = Agents(url) if rl is None else Trains(url, model, kind, rl)
    told.send(None)
    with contextlib.suppress(EOFError):
        while told.recv() == "go":
            while not told.poll():
                told.send(tenant.step())
            told.recv()
            told.send(None)
