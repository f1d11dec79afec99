"""Rows about adapters on replicas: tokens per second with 8 adapters on 2 real vLLMs of 4 slots each, when the router
prefers a replica by adapter, and when it takes turns.

vLLM computes with at most 4 adapters at a time here. A request for a fifth waits until one of them has no request.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import aiohttp
import torch
from safetensors.torch import save_file

from benchmarks.stage import Stage, rollout, router
from benchmarks.table import Row, Target
from skyrl.base.tiny import model_path

REPLICAS, SLOTS, ADAPTERS = 2, 4, 8
CLIENTS_PER_ADAPTER = 4
TOKENS = 48
OPTIONS = {"trainer.policy.model.lora.max_loras": SLOTS, "trainer.policy.model.lora.max_cpu_loras": ADAPTERS}
POLICIES = ("round_robin", "adapter_affinity")


def make_adapter(directory: Path, seed: int) -> None:
    """A LoRA adapter of rank 8 with random weights for the tiny model."""
    config = json.loads((model_path() / "config.json").read_text())
    hidden, heads, head = config["hidden_size"], config["num_attention_heads"], config["head_dim"]
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        weights[f"{name}.lora_A.weight"] = torch.randn(8, hidden, generator=generator) / 10
        weights[f"{name}.lora_B.weight"] = torch.randn(heads * head, 8, generator=generator) / 10
    directory.mkdir()
    save_file(weights, directory / "adapter_model.safetensors")
    facts = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"], "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(facts | {"base_model_name_or_path": "tiny"}))


async def _sidecars(url: str) -> list[str]:
    async with aiohttp.ClientSession() as session:
        while True:
            async with session.get(f"{url}/workers") as answer:
                workers = (await answer.json())["workers"]
            if all(worker["is_healthy"] for worker in workers):
                return [worker["url"] for worker in workers]
            await asyncio.sleep(0.2)


async def load(url: str, seconds: float) -> float:
    """Tokens per second, with CLIENTS_PER_ADAPTER requests in flight for each adapter."""
    end, tokens = time.perf_counter() + seconds, 0

    async def client(session: aiohttp.ClientSession, adapter: str) -> None:
        nonlocal tokens
        params = {"max_new_tokens": TOKENS, "ignore_eos": True, "temperature": 1.0}
        body = {"input_ids": list(range(10, 42)), "sampling_params": params, "lora_path": adapter}
        while time.perf_counter() < end:
            async with session.post(f"{url}/generate", json=body) as answer:
                assert answer.status == 200, await answer.text()
                sampled = len((await answer.json())["output_ids"])
            if time.perf_counter() < end:
                tokens += sampled

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        names = [f"adapter-{number}" for number in range(ADAPTERS)]
        await asyncio.gather(*(client(session, name) for name in names for _ in range(CLIENTS_PER_ADAPTER)))
    return tokens / seconds


async def load_adapters(url: str, directory: Path) -> None:
    async with aiohttp.ClientSession() as session:
        for number in range(ADAPTERS):
            body = {"lora_name": f"adapter-{number}", "lora_path": str(directory / f"adapter-{number}")}
            async with session.post(f"{url}/v1/load_lora_adapter", json=body) as answer:
                assert answer.status == 200, await answer.text()


def compare(stage: Stage) -> list[Row]:
    """ "direct" is round robin."""
    rounds, seconds = (2, 4.0) if stage.quick else (4, 8.0)
    rates: dict[str, list[float]] = {policy: [] for policy in POLICIES}
    with ExitStack() as stack:
        directory = Path(stack.enter_context(TemporaryDirectory()))
        for number in range(ADAPTERS):
            make_adapter(directory / f"adapter-{number}", number)
        plane = stack.enter_context(rollout(directory / "plane", "tiny", REPLICAS, OPTIONS))
        sidecars = asyncio.run(_sidecars(plane))
        urls = {policy: stack.enter_context(router(*sidecars, flags=("--policy", policy))) for policy in POLICIES}
        asyncio.run(load_adapters(urls[POLICIES[0]], directory))
        for policy in POLICIES:  # warm up
            asyncio.run(load(urls[policy], 1.0))
        for _ in range(rounds):
            for policy in POLICIES:
                rates[policy].append(asyncio.run(load(urls[policy], seconds)))
    stage.raw.append({"row": "affinity", "path": "router", "tokens_per_s": rates})
    turns, affinity = (statistics.median(rates[policy]) for policy in POLICIES)
    what = f"tokens/s, {ADAPTERS} adapters on {REPLICAS} vLLMs of {SLOTS} slots, by adapter (direct: round robin)"
    note = "; ".join(f"{policy}: {', '.join(f'{rate:,.0f}' for rate in values)}" for policy, values in rates.items())
    return [Row("affinity", what, "/s", affinity, Target(turns, at_most=False), turns, note=note)]
