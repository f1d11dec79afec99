"""What the text of samples costs vLLM's API server: answers with text and without
(`skyrl.inference.vllm_plugin.tokens_header`), in turns. `python -m benchmarks.text_cost [--rounds N]`.

One vLLM with the tiny model. A round sends 24 requests with 8 sequences of 32 tokens, three at a time. Prints the
median CPU seconds of the API server's process per 1,000 sampled tokens, and the bytes of an answer.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
from collections import defaultdict
from pathlib import Path

import httpx
import psutil

from benchmarks.processes import cpu_seconds
from skyrl.base.config.loading import load_config
from skyrl.base.tiny import model_path
from skyrl.inference.placement import LocalPlacement
from skyrl.inference.vllm_command import vllm_spec
from skyrl.inference.vllm_plugin.tokens_header import TOKENS_ONLY
from skyrl.runtime.processes.ports import free_port
from skyrl.server.sampling import completion

KEY = "benchmark"
SEQUENCES, TOKENS, TURNS, AT_ONCE = 8, 32, 8, 3
PROMPTS = (16, 400)
WAYS: dict[str, dict[str, str]] = {"with text": {}, "tokens only": {TOKENS_ONLY: "1"}}


async def spend(
    http: httpx.AsyncClient, pid: int, model: str, prompt: int, headers: dict[str, str]
) -> tuple[float, int]:
    """CPU seconds of process `pid` per 1,000 sampled tokens, and the bytes of one answer."""
    body = {"model": model, "prompt": [5 + number % 200 for number in range(prompt)], "n": SEQUENCES}
    body |= {"max_tokens": TOKENS, "ignore_eos": True, "logprobs": 0, "return_token_ids": True}
    before, size = cpu_seconds(pid), 0
    for _ in range(TURNS):
        sent = (http.post(completion.PATH, json=body, headers=headers) for _ in range(AT_ONCE))
        for answer in await asyncio.gather(*sent):
            answer.raise_for_status()
            size = len(answer.content)
    return (cpu_seconds(pid) - before) / (TURNS * AT_ONCE * SEQUENCES * TOKENS) * 1e3, size


async def measure(rounds: int) -> None:
    with tempfile.TemporaryDirectory(prefix="skyrl-text-") as directory:
        config = load_config({"base_model": str(model_path()), "state_dir": Path(directory) / "state"})
        spec = vllm_spec(config, free_port(), KEY, cuda=False)
        server = LocalPlacement(Path(directory)).run(spec)
        headers = {"Authorization": f"Bearer {KEY}"}
        try:
            async with httpx.AsyncClient(base_url=spec.url, headers=headers, trust_env=False, timeout=300) as http:
                await until_ready(http)
                pid = psutil.Process().children()[0].pid
                for prompt in PROMPTS:
                    await compare(http, pid, config.served_names[0], prompt, rounds)
        finally:
            await server.stop()


async def until_ready(http: httpx.AsyncClient) -> None:
    async with asyncio.timeout(300):
        while True:
            try:
                if (await http.get("/health")).status_code == httpx.codes.OK:
                    return
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.2)


async def compare(http: httpx.AsyncClient, pid: int, model: str, prompt: int, rounds: int) -> None:
    await spend(http, pid, model, prompt, {})  # the first samples take longer
    found: defaultdict[str, list[tuple[float, int]]] = defaultdict(list)
    for number in range(rounds):
        for way in list(WAYS) if number % 2 else reversed(WAYS):
            found[way].append(await spend(http, pid, model, prompt, WAYS[way]))
    for way in WAYS:
        cpu, size = statistics.median(seconds for seconds, _ in found[way]), found[way][0][1]
        print(f"prompt of {prompt} tokens, {way}: {cpu:.3f} CPU s per 1,000 sampled tokens, {size:,} bytes an answer")


def main() -> None:
    parser = argparse.ArgumentParser(description="What the text of samples costs vLLM's API server.")
    parser.add_argument("--rounds", type=int, default=5)
    asyncio.run(measure(parser.parse_args().rounds))


if __name__ == "__main__":
    main()
