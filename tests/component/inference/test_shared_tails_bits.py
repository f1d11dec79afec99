"""Samples of one prompt that share all of it, and the same samples computed apart, with the same vLLM in this size of
batch: the bits are equal."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from skyrl.base.tiny import model_path
from skyrl.inference.vllm_command import OFFLINE

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

PROGRAM = """
import json, random, sys
from skyrl.inference.vllm_plugin import prefix_cache
model, shares, lengths = sys.argv[1], sys.argv[2] == "True", json.loads(sys.argv[3])
if not shares:
    prefix_cache.can_share = lambda scheduler: False
from vllm import LLM, SamplingParams
llm = LLM(
    model, dtype="float32", enforce_eager=True, max_model_len=512, block_size=32, enable_chunked_prefill=False,
    max_num_batched_tokens=8192, logprobs_mode="processed_logprobs", num_gpu_blocks_override=1000, seed=0,
)
core = llm.llm_engine.engine_core.engine_core
steps = []
schedule = type(core.scheduler).schedule
def counted(*args, **kwargs):
    output = schedule(*args, **kwargs)
    steps.append(output.total_num_scheduled_tokens)
    return output
type(core.scheduler).schedule = counted
draw = random.Random(5)
prompts = [{"prompt_token_ids": [draw.randrange(5, 400) for _ in range(length)]} for length in lengths]
params = SamplingParams(n=6, max_tokens=40, seed=3, logprobs=0, ignore_eos=True)
found = llm.generate(prompts, params, use_tqdm=False)
rows = [
    [list(choice.token_ids), [cells[token].logprob for token, cells in zip(choice.token_ids, choice.logprobs)]]
    for answer in found for choice in answer.outputs
]
print("RESULT" + json.dumps([steps[0], rows]))
"""
ENVIRONMENT = {
    **OFFLINE,
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
}
LENGTHS = [20, 45, 64, 33, 110]
"""Prompts that end in their first block, in their second, at a block's end, one token behind one, and in the fourth."""


def test_samples_that_share_their_prompt_have_the_bits_of_samples_that_do_not() -> None:
    def sampled(*, shares: bool) -> tuple[int, list[tuple[list[int], list[float]]]]:
        command = [sys.executable, "-c", PROGRAM, str(model_path()), str(shares), json.dumps(LENGTHS)]
        done = subprocess.run(command, env=os.environ | ENVIRONMENT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.rpartition("RESULT")[2])

    (computed, together), (computed_apart, apart) = sampled(shares=True), sampled(shares=False)
    assert computed == sum(LENGTHS) + 5  # and the last token of the prompt of 33, by each of the five other samples
    assert computed_apart == sum(LENGTHS) + 5 * (20 + 13 + 32 + 1 + 14)
    assert len(together) == 6 * len(LENGTHS)
    assert together == apart
