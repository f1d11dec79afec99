"""A real vLLM whose cache holds one sequence of the whole context: many samples whose answers grow. How admission works
is tested on vLLM's own scheduler, in `tests/unit/inference/test_cache_headroom.py`."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest
from vllm_world import CONTEXT, KEY, running_vllm

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

SAMPLES, BLOCK = 48, 32


async def test_all_answers_come_from_a_small_cache_without_a_storm_of_preemptions(tmp_path: Path) -> None:
    async with (
        running_vllm(tmp_path / "logs", tmp_path / "state", num_gpu_blocks_override=CONTEXT // BLOCK + 1) as server,
        httpx.AsyncClient(
            base_url=server.spec.url, headers={"Authorization": f"Bearer {KEY}"}, trust_env=False, timeout=None
        ) as http,
    ):

        async def sample(number: int) -> int:
            body = {"model": server.config.served_names[0], "prompt": [3 + number] * 20, "max_tokens": 400}
            answer = await http.post("/v1/completions", json=body | {"ignore_eos": True, "priority": number})
            assert answer.status_code == 200, answer.text
            return answer.json()["usage"]["completion_tokens"]

        assert await asyncio.gather(*map(sample, range(SAMPLES))) == [400] * SAMPLES
        counted = [
            float(line.split()[-1])
            for line in (await http.get("/metrics")).text.splitlines()
            if line.startswith("vllm:num_preemptions_total{")
        ]
        assert len(counted) == 1
        print("FIGURE", counted)
        assert counted[0] < SAMPLES
