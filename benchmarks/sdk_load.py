"""The real Tinker SDK as a load generator. It measures its own CPU, so that the limit of the SDK shows.

Usage: python -m benchmarks.sdk_load URL IN_FLIGHT SECONDS; prints JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import Counter
from typing import Any

import tinker
from tinker import types

from benchmarks import prompts
from benchmarks.series import quantile

WARM_UP_S = 2.0


async def run(client: tinker.SamplingClient, in_flight: int, seconds: float) -> dict[str, Any]:
    """A closed loop. After a warm-up, samples that end within the window are measured."""
    latencies: list[float] = []
    errors: Counter[str] = Counter()
    state = {"measuring": False, "stopping": False}
    inputs = [
        types.ModelInput.from_ints(prompts.prompt(index, prompts.PROMPT_TOKENS)) for index in range(prompts.VARIANTS)
    ]
    expected = [prompts.answer(index, prompts.MAX_TOKENS) for index in range(prompts.VARIANTS)]
    params = types.SamplingParams(max_tokens=prompts.MAX_TOKENS)

    async def worker(number: int) -> None:
        variant = number % prompts.VARIANTS
        while not state["stopping"]:
            began = time.perf_counter()
            try:
                answer = await client.sample(inputs[variant], 1, params)
            except tinker.TinkerError as error:
                errors[type(error).__name__] += 1
                continue
            if answer.sequences[0].tokens != expected[variant]:
                errors["wrong tokens"] += 1
            elif state["measuring"]:
                latencies.append(time.perf_counter() - began)

    workers = [asyncio.create_task(worker(number)) for number in range(in_flight)]
    await asyncio.sleep(WARM_UP_S)
    state["measuring"], cpu_s, began = True, time.process_time(), time.perf_counter()
    await asyncio.sleep(seconds)
    state["measuring"], state["stopping"] = False, True
    wall_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu_s
    await asyncio.wait_for(asyncio.gather(*workers), 60)
    return {
        "sdk": tinker.__version__,
        "samples": len(latencies),
        "wall_s": wall_s,
        "samples_per_s": len(latencies) / wall_s,
        "p50_ms": quantile(latencies, 0.5) * 1e3,
        "p99_ms": quantile(latencies, 0.99) * 1e3,
        "generator_cpu_s_per_1000": cpu_s / max(1, len(latencies)) * 1e3,
        "generator_cores": cpu_s / wall_s,
        "errors": dict(errors),
    }


def main(url: str, in_flight: int, seconds: float) -> None:
    with tinker.ServiceClient(base_url=url, api_key="tml-bench") as service:
        client = service.create_sampling_client(base_model="tiny").result()
        print(json.dumps(asyncio.run(run(client, in_flight, seconds))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
