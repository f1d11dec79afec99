"""Keeps samples of one adapter in flight, until its standard input ends: `python -m benchmarks.hand_over_load URL MODEL
IN_FLIGHT TOKENS`. Prints a line when all have begun. Knows the SDK alone."""

from __future__ import annotations

import asyncio
import sys

import tinker
from tinker import types


async def run(sampler: tinker.SamplingClient, in_flight: int, tokens: int) -> None:
    """A closed loop. Prompts differ, so that no two have a common prefix."""
    params = types.SamplingParams(max_tokens=tokens, temperature=1.0, stop=[])

    async def worker(number: int) -> None:
        prompt = types.ModelInput.from_ints([(number + 3 * place) % 200 + 5 for place in range(32)])
        while True:
            await sampler.sample(prompt, 1, params)

    workers = [asyncio.create_task(worker(number)) for number in range(in_flight)]
    await asyncio.sleep(1.0)
    print("in flight", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    for each in workers:
        each.cancel()
    await asyncio.gather(*workers, return_exceptions=True)


def main(url: str, model: str, in_flight: int, tokens: int) -> None:
    with tinker.ServiceClient(base_url=url, api_key="tml-hand-over-load") as service:
        trainer = service.create_lora_training_client(base_model=model, rank=8, seed=2).result()
        asyncio.run(run(trainer.save_weights_and_get_sampling_client().result(), in_flight, tokens))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
