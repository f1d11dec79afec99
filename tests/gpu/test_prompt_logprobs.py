"""Prompt logprobs, target logprobs and alternatives of vLLM on a GPU, in both of its model runners, of requests with
different adapters on all layers and lm_head beside requests of the base model.

Needs vLLM with skyrl's plugin, so skyrl must be installed. `tests/unit/inference/test_prompt_runners.py` tests the same
without a GPU, with vLLM's kernels replaced. The rehearsal on a CPU has the first runner alone.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
import pytest
import torch

from skyrl.base.config.loading import load_config
from skyrl.base.tiny import model_path
from skyrl.base.types.weights import LoraSpec
from skyrl.inference.placement import LocalPlacement, LocalServer
from skyrl.inference.vllm_command import cuda_devices, plugin_installed, vllm_spec
from skyrl.inference.vllm_plugin.protocol import PromptScores
from skyrl.runtime.processes.ports import free_port
from skyrl.trainer.protocol import AdamParams, Datum, TrainingPass
from skyrl.trainer.ranks.lora_backend import LoraBackend
from tests.gpu.figures import FIGURES
from tests.gpu.support import NUMERICS, REHEARSAL, backend_on, build, ok

KEY = "test-key"
SETTINGS = NUMERICS | {"vocab_size": 1024, "max_position_embeddings": 4096}
ADAPTERS = ("one", "two")
PROMPTS = (("base", 40), ("one", 1500), ("two", 300), ("one", 7), ("base", 900), ("two", 1100))
"""The model and the length of each prompt. The second runner computes logits of 1024 rows at a time."""
SLACK = 3.0
"""How much further from float32 vLLM may be than the trainer in bfloat16: vLLM's adapters are bfloat16, too."""

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        find_spec("vllm") is None or not plugin_installed(),
        reason="needs vLLM, and skyrl installed beside it (pip install -e . --no-deps)",
    ),
]


@dataclass(frozen=True)
class Prompt:
    """A prompt, and the right logprobs of its tokens from the second on, float32 [tokens - 1]: of the model that it is
    for, and of the base model."""

    model: str
    tokens: list[int]
    right: npt.NDArray[np.float32]
    of_base: npt.NDArray[np.float32]


@dataclass(frozen=True)
class World:
    base: str
    adapters: Path
    prompts: list[Prompt]
    rounding: float
    """The distance (RMS) of the trainer's logprobs in bfloat16 from the right ones, which are float32."""


def _datum(seed: int, length: int) -> Datum:
    text = np.random.default_rng(seed).integers(0, SETTINGS["vocab_size"], length)
    return Datum(text[:-1], {"target_tokens": text[1:], "weights": np.ones(length - 1, np.float32)})


def _logprobs(backend: LoraBackend, name: str, datum: Datum) -> npt.NDArray[np.float32]:
    return ok(backend.run([TrainingPass(name, [datum], "cross_entropy", backward=False)]))[0].logprobs[0]


def _rms(gap: npt.NDArray[np.float32]) -> float:
    return float(np.sqrt(np.mean(gap.astype(np.float64) ** 2)))


@pytest.fixture(scope="module")
def world(bases: Path, tmp_path_factory: pytest.TempPathFactory) -> World:
    """A base model, two trained adapters, and the right logprobs by the trainer in float32."""
    base = tmp_path_factory.mktemp("served") / "model"
    shutil.copytree(build(SETTINGS, bases), base)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(model_path() / name, base / name)
    adapters = tmp_path_factory.mktemp("adapters")
    exact, rounded = backend_on(str(base), dtype=torch.float32), backend_on(str(base))
    for number, name in enumerate(("base", *ADAPTERS)):
        spec = LoraSpec(rank=8, alpha=32.0, seed=3 + number)
        exact.create_model(name, spec)
        if name != "base":
            for _ in range(3):
                ok(exact.run([TrainingPass(name, [_datum(number, 200)], "cross_entropy")]))
                exact.optim_step(name, AdamParams(learning_rate=3e-2))
            (adapters / name).mkdir()
            exact.save_adapter(name, adapters / name)
    (adapters / "state").mkdir()
    exact.save_state("one", adapters / "state")
    rounded.create_model("one", LoraSpec(rank=8, alpha=32.0, seed=4))
    rounded.load_state("one", adapters / "state", optimizer=False)
    prompts = []
    for seed, (name, length) in enumerate(PROMPTS, start=50):
        datum = _datum(seed, length)
        tokens = [*datum.tokens.tolist(), int(datum.loss_inputs["target_tokens"][-1])]
        prompts.append(Prompt(name, tokens, _logprobs(exact, name, datum), _logprobs(exact, "base", datum)))
    rounding = _rms(_logprobs(rounded, "one", _datum(51, 1500)) - prompts[1].right)
    return World(str(base), adapters, prompts, rounding)


@asynccontextmanager
async def _served(world: World, runner: str, directory: Path) -> AsyncIterator[httpx.AsyncClient]:
    """A vLLM as skyrl starts it, with this runner ("0": the first, "1": the second) and both adapters."""
    settings = {
        "generator.inference_engine.gpu_memory_utilization": 0.3,
        "generator.inference_engine.max_model_len": 2048,
        "trainer.policy.model.lora": {"max_loras": len(ADAPTERS), "max_lora_rank": 8},
    }
    config = load_config({"base_model": world.base, "state_dir": directory / "state", "backend_config": settings})
    spec = vllm_spec(config, free_port(), KEY, cuda=not REHEARSAL)
    spec = replace(spec, env={**spec.env, "VLLM_USE_V2_MODEL_RUNNER": runner})
    server = LocalPlacement(directory).run(spec, cuda_devices()[:1])
    try:
        async with httpx.AsyncClient(
            base_url=spec.url, headers={"Authorization": f"Bearer {KEY}"}, timeout=300
        ) as http:
            await _until_up(http, server)
            for name in ADAPTERS:
                body = {"lora_name": name, "lora_path": str(world.adapters / name)}
                answer = await http.post("/v1/load_lora_adapter", json=body)
                assert answer.status_code == 200, answer.text
            yield http
    except AssertionError as error:
        raise AssertionError(f"{error}\n{server.log_tail(60)}") from error
    finally:
        await server.stop()


async def _until_up(http: httpx.AsyncClient, server: LocalServer) -> None:
    end = time.monotonic() + 600
    while True:
        try:
            if (await http.get("/health")).status_code == 200:
                return
        except httpx.TransportError:
            pass
        assert time.monotonic() < end, "vLLM has not started"
        await asyncio.sleep(0.5)


async def _rows(http: httpx.AsyncClient, base: str, prompt: Prompt, asked: PromptScores) -> list[dict[str, Any]]:
    """The rows of prompt logprobs after the first, which is empty. Each is a map from token to logprob and rank."""
    body = {
        "model": base if prompt.model == "base" else prompt.model,
        "prompt": prompt.tokens,
        "max_tokens": 1,
        "prompt_logprobs": 1,
        "temperature": 0,
        "vllm_xargs": asked.to_extra_args(),
    }
    answer = await http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["prompt_logprobs"][1:]


def _own_tokens(prompt: Prompt, *, draws: int) -> PromptScores:
    """Asks for the logprobs of the prompt's own tokens by name, and for draws; at temperature 0 these are the best."""
    rows = np.arange(len(prompt.tokens) - 1, dtype=np.int32)
    return PromptScores(rows, np.asarray(prompt.tokens[1:], np.int32), draws, seed=1)


@pytest.mark.parametrize("runner", ["0", "1"], ids=["first", "second"])
async def test_prompt_logprobs_are_those_of_each_requests_own_adapter(
    world: World, tmp_path: Path, runner: str
) -> None:
    if REHEARSAL and runner == "1":
        pytest.skip("vLLM's second runner needs a GPU")
    bound = SLACK * world.rounding if not REHEARSAL else 1e-4
    gaps: dict[str, float] = {}
    async with _served(world, runner, tmp_path) as http:
        listed = [model["id"] for model in (await http.get("/v1/models")).json()["data"]]
        base = next(name for name in listed if name not in ADAPTERS)
        asked = [_own_tokens(prompt, draws=2) for prompt in world.prompts]
        answers = await asyncio.gather(*(_rows(http, base, *pair) for pair in zip(world.prompts, asked, strict=True)))
    for number, (prompt, rows) in enumerate(zip(world.prompts, answers, strict=True)):
        own = len(prompt.tokens) - 1
        assert len(rows) == 4 * own
        given = np.array(
            [row[str(token)]["logprob"] for row, token in zip(rows, prompt.tokens[1:], strict=False)], np.float32
        )
        gaps[f"{number} {prompt.model} {len(prompt.tokens)}"] = gap = _rms(given - prompt.right)
        assert gap <= bound, gaps
        if prompt.model != "base":
            assert _rms(prompt.right - prompt.of_base) > 5 * bound, "the adapter changes too little to be seen"
        named = [list(row.items()) for row in rows[own : 2 * own]]
        assert [[int(token) for token, _ in row] for row in named] == [[token] for token in prompt.tokens[1:]]
        assert np.abs(np.array([row[0][1]["logprob"] for row in named]) - given).max() < 1e-3
        best = [next(token for token, value in row.items() if value["rank"] == 1) for row in rows[:own]]
        assert [list(row) for row in rows[2 * own :]] == [[token] for token in best for _ in range(2)]
    what = f"prompt logprobs of vLLM, runner {runner}: largest distance from float32 (RMS)"
    FIGURES.record(what, max(gaps.values()))
    FIGURES.record("the trainer's own rounding of the same logprobs (RMS)", world.rounding)
