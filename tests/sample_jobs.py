"""A sample job, for tests of what forwards jobs. `msgspec.structs.replace` changes its fields."""

from __future__ import annotations

from skyrl.base.types.weights import BaseWeights
from skyrl.base.wire.sample_request import Distribution
from skyrl.sampling.job import SampleJob

JOB = SampleJob(
    request_id="r1",
    session_key="s1:sample:0:1",
    model="base",
    weights=BaseWeights(),
    prompt=[5, 6, 7],
    num_samples=1,
    max_tokens=3,
    distribution=Distribution(),
    seed=None,
    stop_strings=[],
    stop_token_ids=[],
    ignore_eos=False,
    prompt_logprobs=False,
    prompt_logprobs_last_n=None,
    topk_prompt=0,
    topk_sample=0,
)
