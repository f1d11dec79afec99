"""How many bytes the inference server's answer to a job can have.

A bound against an upstream that sends anything, so each part is as long as vLLM could write it, not as long as it
usually is: a token's text has up to some 128 characters, each of which JSON may write as two bytes, and it stands in
several places. A usual cell of the prompt has 80 bytes, a usual sampled token 75.
"""

from __future__ import annotations

from skyrl.sampling.job import SampleJob
from skyrl.sampling.prompt_answer import prompt_scores

MAX_ANSWER_BYTES = 512 * 2**20
"""However much was asked for. Some five million sampled tokens with their logprobs."""
BASE_BYTES = 2**20
SEQUENCE_BYTES = 4 * 2**10
ECHOED_TOKEN_BYTES = 12
"""Each sequence repeats the prompt's token ids."""
SAMPLED_TOKEN_BYTES = 1024
"""Its id, text, logprob and offset, and its row of the best tokens, with itself in it."""
SAMPLED_CELL_BYTES = 96
"""One more of the best tokens of a sampled token. It is named by its id, not by its text: some 45 bytes."""
PROMPT_CELL_BYTES = 512
"""One token of a row of the prompt, with its text."""


def answer_bound(job: SampleJob) -> int:
    """In bytes. `job.max_tokens` must be known."""
    assert job.max_tokens is not None
    sequences, prompt = 1 if job.greedy else job.num_samples, len(job.prompt)
    sampled = sequences * job.max_tokens * (SAMPLED_TOKEN_BYTES + job.topk_sample * SAMPLED_CELL_BYTES)
    cells = 0
    if job.wants_prompt:
        scores = prompt_scores(job)
        cells = prompt * (1 + job.topk_prompt) + (0 if scores is None else scores.appended(prompt))
    echoed = sequences * (SEQUENCE_BYTES + prompt * ECHOED_TOKEN_BYTES)
    return min(MAX_ANSWER_BYTES, BASE_BYTES + echoed + sampled + cells * PROMPT_CELL_BYTES)
