"""One user of the server, with whatever SDK is installed.

Knows the ways in which SDK versions return the result of a call (a value, a future, a coroutine of either), and how to
make data. Does not know which version is installed.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import quote
from urllib.request import urlopen

import numpy as np
import tinker
from tinker import types

from tests.sdk_programs import TRACED, succeeded

from .catalogue import QUESTION

MODEL = "Qwen/Qwen3-4B-Instruct-2507"
"""A name of the served model. The working directory has a directory with this name that holds the tokenizer."""
SECOND_NAME = "tiny"
TEXT = "The old fox watches the river at dawn."
PROMPT = "The old"
WAIT_S = 300.0
POLL_S = 0.05


def wait(given: Any) -> Any:
    """The value of a value, of a future, or of a coroutine of either."""
    if inspect.iscoroutine(given):
        given = asyncio.run(given)
    return wait(given.result(timeout=WAIT_S)) if hasattr(given, "result") else given


def run_program(*arguments: str, given: bytes = b"") -> bytes:
    """The output of a Python program in this environment. The environment has the SDK and not the packages that the run
    borrows, which are slow to import."""
    env = os.environ | TRACED | {"PYTHONPATH": ""}
    done = subprocess.run([sys.executable, *arguments], input=given, capture_output=True, timeout=300, env=env)
    said = done.stderr.decode()
    assert succeeded(done.returncode, said), f"{done.returncode}: {said}"
    return done.stdout


def refusal(call: Callable[[], Any]) -> str:
    """The error message of `call`. Raises AssertionError if `call` succeeds."""
    try:
        wait(call())
    except (tinker.APIStatusError, tinker.RequestFailedError) as error:
        return str(error)
    raise AssertionError("this should have been refused, and was not")


def both(owner: Any, name: str, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """The results of a method and of its `_async` twin."""
    return wait(getattr(owner, name)(*args, **kwargs)), wait(getattr(owner, f"{name}_async")(*args, **kwargs))


def tensor(values: Any, dtype: Any = np.float32) -> types.TensorData:
    return types.TensorData.from_numpy(np.asarray(values, dtype))


def datum(tokens: Sequence[int], **inputs: Any) -> types.Datum:
    """Next-token prediction over `tokens`; further loss inputs are float32."""
    targets = {"target_tokens": tensor(tokens[1:], np.int64)}
    others = {name: tensor(values) for name, values in inputs.items()}
    return types.Datum(model_input=types.ModelInput.from_ints(list(tokens[:-1])), loss_fn_inputs=targets | others)


def logprobs_of(output: Any, index: int = 0) -> np.ndarray:
    """float64, shaped like the targets: the target logprobs of one datum of a pass."""
    return np.asarray(output.loss_fn_outputs[index]["logprobs"].to_numpy(), np.float64)


class User:
    """A service client with its own session, and the objects from which most checks start."""

    def __init__(self, url: str, key: str, directory: Path) -> None:
        self.url, self.key, self.directory = url, key, directory

    @cached_property
    def service(self) -> Any:
        return self.open()

    @cached_property
    def quiet(self) -> tuple[Any, float]:
        """A training client whose session sends only heartbeats, and when it was made, in monotonic seconds."""
        return self.train(self.open()), time.monotonic()

    @cached_property
    def rest(self) -> Any:
        return self.service.create_rest_client()

    @property
    def administrators(self) -> list[Any]:
        """The clients with administrators' methods: `rest`, and in newer SDKs a separate client."""
        admin = getattr(tinker, "AdminClient", None)
        return [self.rest] if admin is None else [self.rest, admin(base_url=self.url, api_key=self.key)]

    @cached_property
    def model(self) -> Any:
        """A training client that no check changes."""
        return self.train(seed=1)

    @cached_property
    def sampler(self) -> Any:
        """A sampling client of the base model."""
        return wait(self.service.create_sampling_client(base_model=MODEL))

    @cached_property
    def tokenizer(self) -> Any:
        return self.model.get_tokenizer()

    @cached_property
    def tokens(self) -> list[int]:
        return list(self.tokenizer.encode(TEXT))

    @cached_property
    def prompt(self) -> types.ModelInput:
        return types.ModelInput.from_ints(list(self.tokenizer.encode(PROMPT)))

    @property
    def data(self) -> list[types.Datum]:
        return [datum(self.tokens, weights=np.ones(len(self.tokens) - 1))]

    def open(self, **kwargs: Any) -> Any:
        """A new service client with a new session."""
        settings: dict[str, Any] = {"base_url": self.url, "api_key": self.key} | kwargs
        return tinker.ServiceClient(**settings)

    def asked(self, route: str) -> int:
        """How many requests to this route the current feature has sent so far."""
        with urlopen(f"{self.url}{QUESTION}{quote(route)}", timeout=WAIT_S) as answer:
            return json.load(answer)

    def wait_until_asked(self, route: str, count: int) -> None:
        while self.asked(route) < count:
            time.sleep(POLL_S)

    def session_of(self, trainer: Any) -> str:
        return self.model_id(trainer).partition(":train:")[0]

    def model_id(self, trainer: Any) -> str:
        return wait(trainer.get_info()).model_id

    def train(self, service: Any = None, **kwargs: Any) -> Any:
        """A new LoRA training client, by default with rank 4 and a fixed seed, so that it learns alike every time."""
        settings = {"base_model": MODEL, "rank": 4, "seed": 1} | kwargs
        return wait((service or self.service).create_lora_training_client(**settings))

    def step(self, trainer: Any, learning_rate: float = 5e-3) -> float:
        """Run one cross-entropy step on TEXT; returns the loss before the step."""
        passed = trainer.forward_backward(self.data, "cross_entropy")
        stepped = trainer.optim_step(types.AdamParams(learning_rate=learning_rate))
        wait(stepped)
        return wait(passed).metrics["loss:sum"]

    def scores(self, trainer: Any, tokens: Sequence[int] | None = None) -> np.ndarray:
        """float64: logprobs of TEXT, or of `tokens`, under a training client."""
        return logprobs_of(wait(trainer.forward([datum(tokens or self.tokens)], "cross_entropy")))

    def greedy(self, sampler: Any, max_tokens: int = 12) -> list[int]:
        """The most likely continuation of PROMPT, without stops before max_tokens."""
        params = types.SamplingParams(max_tokens=max_tokens, temperature=0.0, stop=[])
        return list(wait(sampler.sample(self.prompt, 1, params)).sequences[0].tokens)

    def prompt_logprobs(self, sampler: Any) -> np.ndarray:
        """float64: logprobs of TEXT's tokens but the first, under a sampling client."""
        scored = wait(sampler.compute_logprobs(types.ModelInput.from_ints(self.tokens)))
        assert scored[0] is None
        return np.asarray(scored[1:], np.float64)


def same(left: Any, right: Any, tolerance: float = 1e-3) -> bool:
    """Whether two arrays agree within a tolerance: sampler and trainer compute logprobs with different kernels."""
    left, right = np.asarray(left, np.float64), np.asarray(right, np.float64)
    return left.shape == right.shape and bool(np.all(np.abs(left - right) <= tolerance))


def close(left: float, right: float, tolerance: float = 1e-3) -> bool:
    return math.isclose(left, right, rel_tol=tolerance, abs_tol=tolerance)
