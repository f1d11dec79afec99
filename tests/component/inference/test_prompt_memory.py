"""The memory that a real vLLM takes for the logprobs of prompts, with a vocabulary as large as a released model's."""

from __future__ import annotations

import asyncio
import json
import random
import re
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from skyrl.base.config.loading import load_config
from skyrl.base.tiny import model_path
from skyrl.inference.placement import LocalPlacement
from skyrl.inference.vllm_command import vllm_spec
from skyrl.inference.vllm_plugin.protocol import PromptScores
from skyrl.runtime.processes.ports import free_port

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]
# Slow: a minute, and up to 2 GB; the tiny model's vocabulary needs no parts.

KEY = "test-key"
VOCABULARY, CONTEXT = 151_936, 4096
BOUND_MB = 300
"""All logits of the longest prompt here are 2,490 MB, and their logprobs as much again."""


def _model(directory: Path) -> Path:
    """A small model with random weights and the vocabulary of Qwen2.5; the tiny model's tokenizer has the first ids."""
    small = json.loads((model_path() / "config.json").read_text())
    wide = {"vocab_size": VOCABULARY, "tie_word_embeddings": True, "initializer_range": 0.05}
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**small | wide)).save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(model_path() / name, directory / name)
    return directory


@asynccontextmanager
async def _served(base: Path, directory: Path) -> AsyncIterator[httpx.AsyncClient]:
    backend = {
        "generator.inference_engine.max_model_len": CONTEXT,
        "generator.inference_engine.engine_init_kwargs": {"max_num_batched_tokens": CONTEXT},
        "trainer.policy.model.lora": {"max_loras": 1, "max_lora_rank": 8},
    }
    config = load_config({"base_model": str(base), "state_dir": directory / "state", "backend_config": backend})
    spec = vllm_spec(config, free_port(), KEY, cuda=False)
    server = LocalPlacement(directory).run(spec, [])
    try:
        headers = {"Authorization": f"Bearer {KEY}"}
        async with httpx.AsyncClient(base_url=spec.url, headers=headers, timeout=300) as http:
            end = time.monotonic() + 400
            while not await _is_up(http):
                assert time.monotonic() < end, f"vLLM has not started\n{server.log_tail(40)}"
                await asyncio.sleep(0.5)
            yield http
    finally:
        await server.stop()


async def _is_up(http: httpx.AsyncClient) -> bool:
    try:
        return (await http.get("/health")).status_code == 200
    except httpx.TransportError:
        return False


def _engine() -> psutil.Process:
    """vLLM's process that computes: the one with most memory."""
    return max(psutil.Process().children(recursive=True), key=lambda process: process.memory_info().rss)


def _forget_peak(engine: psutil.Process) -> None:
    Path(f"/proc/{engine.pid}/clear_refs").write_text("5")


def _peak_mb(engine: psutil.Process) -> float:
    status = Path(f"/proc/{engine.pid}/status").read_text()
    return int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0]) / 1000


async def _rows(http: httpx.AsyncClient, prompt: list[int], scores: PromptScores | None = None) -> list[dict[str, Any]]:
    """The rows of a prompt's logprobs after the first, which is empty: a map from token to logprob and rank each."""
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": 1, "prompt_logprobs": 1, "temperature": 1}
    if scores is not None:
        body["vllm_xargs"] = scores.to_extra_args()
    answer = await http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["prompt_logprobs"][1:]


async def test_logprobs_of_prompts_of_any_length_take_little_memory(tmp_path: Path) -> None:
    base = _model(tmp_path / "base")
    draw = random.Random(5)
    prompts = [[draw.randrange(VOCABULARY) for _ in range(length)] for length in (4090, 700, 1300, 2048)]
    wanted = PromptScores(np.array([0, 2000, 4088], np.int32), np.array([3, 4, 5], np.int32), draws=1, seed=3)
    async with _served(base, tmp_path) as http:
        plain = {"max_tokens": 1, "temperature": 1}
        for prompt in prompts:  # what a pass of these lengths takes without logprobs of the prompt
            assert (await http.post("/v1/completions", json=plain | {"prompt": prompt[::-1]})).status_code == 200
        await _rows(http, prompts[1][:20])  # loads what is compiled at the first use
        engine = _engine()
        _forget_peak(engine)
        before = _peak_mb(engine)
        alone = await _rows(http, prompts[0], wanted)
        together = await asyncio.gather(*(_rows(http, prompt) for prompt in prompts[1:]))
        taken = _peak_mb(engine) - before
    assert taken < BOUND_MB
    assert len(alone) == 4089 + 3 + 4089
    right = Right(base)
    _check(alone, right.logprobs(prompts[0], prompts[0][1:]), prompts[0][1:])
    named = right.logprobs(prompts[0], [3 if row == 0 else 4 if row == 2000 else 5 for row in range(4089)])
    given = [alone[4089 + n][str(3 + n)]["logprob"] for n in range(3)]
    assert given == pytest.approx([named[row] for row in (0, 2000, 4088)], abs=1e-4)
    for prompt, rows in zip(prompts[1:], together, strict=True):
        _check(rows, right.logprobs(prompt, prompt[1:]), prompt[1:])


class Right:
    """Transformers in float32."""

    def __init__(self, base: Path) -> None:
        self._model = Qwen3ForCausalLM.from_pretrained(base, dtype=torch.float32)

    @torch.no_grad()
    def logprobs(self, prompt: list[int], tokens: list[int]) -> list[float]:
        """The logprob of `tokens[i]` after the first i + 1 tokens of the prompt, computed for a few rows at a time."""
        rows = self._model.model(torch.tensor([prompt])).last_hidden_state[0, :-1]
        parts = zip(rows.split(64), torch.tensor(tokens)[:, None].split(64), strict=True)
        found = [self._model.lm_head(part).log_softmax(-1).gather(1, ids) for part, ids in parts]
        return torch.cat(found)[:, 0].tolist()


def _check(rows: list[dict[str, Any]], right: list[float], tokens: list[int]) -> None:
    assert [row[str(token)]["logprob"] for row, token in zip(rows, tokens, strict=False)] == pytest.approx(
        right, abs=1e-4
    )
