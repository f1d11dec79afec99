"""A request for several sequences and for prompt logprobs, asked of vLLM in two: the prompt once, then the sequences.

vLLM repeats the prompt's rows in every choice: 16 sequences of a prompt of 2,000 tokens with 20 `topk_prompt_logprobs`
are 57 MB of JSON in one answer, and 4 MB in two. It also computes the prompt once per sequence then, because it does
not read its prefix cache for requests that ask for prompt logprobs. Asked apart, the sequences find the prompt there.
"""

from __future__ import annotations

from dataclasses import replace

from skyrl.sampling.completion import SampleAnswer
from skyrl.sampling.job import SampleJob
from skyrl.wire.results import add_prompt


def is_apart(job: SampleJob) -> bool:
    """Whether a job is asked in two. A greedy one is not: vLLM samples it once, whatever `num_samples` is."""
    return job.num_samples > 1 and not job.greedy and job.wants_prompt


def prompt_part(job: SampleJob) -> SampleJob:
    """All that is asked of the prompt, and the one token that vLLM samples at least; that is thrown away.

    Temperature and seed stay: alternatives are drawn by them.
    """
    return replace(
        job, num_samples=1, max_tokens=1, stop_strings=[], stop_token_ids=[], ignore_eos=False, topk_sample=0
    )


def sequences_part(job: SampleJob) -> SampleJob:
    """The sequences alone. They are those of the whole job: seeds, and what ends them, stay."""
    return replace(job, prompt_logprobs=False, prompt_logprobs_last_n=None, topk_prompt=0, target=None, alternatives=0)


def joined(sequences: SampleAnswer, prompt: SampleAnswer) -> SampleAnswer:
    """The answer to the whole job. The prompt counts once, as the first request found it. That the second one finds it
    in the cache saves the server work that nobody was to be charged for."""
    return replace(sequences, body=add_prompt(sequences.body, prompt.body), cached_tokens=prompt.cached_tokens)
