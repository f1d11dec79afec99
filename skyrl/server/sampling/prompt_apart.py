"""Splits a job with several sequences and prompt logprobs into two requests: one for the prompt, one for the sequences.

vLLM repeats the prompt's rows in every choice: 16 sequences of a prompt of 2,000 tokens with 20 `topk_prompt_logprobs`
are 57 MB of JSON in one answer, and 4 MB in two. In one request vLLM also computes the prompt once per sequence,
because a request for prompt logprobs does not use the prefix cache. The second of two requests finds the prompt in the
cache.
"""

from __future__ import annotations

from msgspec.structs import replace

from skyrl.base.wire.results import add_prompt
from skyrl.server.sampling.completion import SampleAnswer
from skyrl.server.sampling.job import SampleJob


def is_apart(job: SampleJob) -> bool:
    """Whether a job becomes two requests. A greedy job does not, because it asks vLLM for one sequence."""
    return job.num_samples > 1 and not job.greedy and job.wants_prompt


def prompt_part(job: SampleJob) -> SampleJob:
    """The first request: the prompt's rows, and one token, because vLLM samples at least one; it is thrown away.

    Temperature and seed stay, because the draws of alternatives depend on them.
    """
    return replace(
        job, num_samples=1, max_tokens=1, stop_strings=[], stop_token_ids=[], ignore_eos=False, topk_sample=0
    )


def sequences_part(job: SampleJob) -> SampleJob:
    """The second request: the sequences. Seeds and stops stay, so they are the sequences of the whole job."""
    return replace(job, prompt_logprobs=False, prompt_logprobs_last_n=None, topk_prompt=0, target=None, alternatives=0)


def joined(sequences: SampleAnswer, prompt: SampleAnswer) -> SampleAnswer:
    """The answer to the whole job. The prompt counts once, with the cached tokens of the first request. The second
    request finds the prompt in the cache only because of the first, so its cached tokens do not count; what it has
    computed nevertheless was computed again. A server that has found nothing may be one that does not report it."""
    again = sequences.computed_again
    if sequences.cached_tokens:
        again += sequences.prompt_tokens - sequences.cached_tokens
    body, upstream_s = add_prompt(sequences.body, prompt.body), sequences.upstream_s + prompt.upstream_s
    cached = prompt.cached_tokens
    return replace(sequences, body=body, cached_tokens=cached, upstream_s=upstream_s, computed_again=again)
