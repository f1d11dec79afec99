"""The largest answer, in bytes, that an inference server can give to a job.

The bound protects against servers that send anything. Each part counts with the largest size that vLLM could write, not
the usual one: the text of a token has up to some 128 characters, JSON may write each as two bytes, and the text occurs
several times. Usually a cell of the prompt has 80 bytes and a sampled token 75.
"""

from __future__ import annotations

from skyrl.server.sampling.job import SampleJob
from skyrl.server.sampling.prompt_answer import prompt_scores

MAX_ANSWER_BYTES = 512 * 2**20
"""For any job: some five million sampled tokens with their logprobs."""
BASE_BYTES = 2**20
SEQUENCE_BYTES = 4 * 2**10
ECHOED_TOKEN_BYTES = 12
"""Each sequence repeats the prompt's token ids."""
SAMPLED_TOKEN_BYTES = 1024
"""The id, text, logprob and offset of a sampled token, and its cell in its row of best tokens."""
SAMPLED_CELL_BYTES = 96
"""Each further cell of that row: usually 45 bytes, because a cell has the id of its token instead of the text."""
PROMPT_CELL_BYTES = 512
"""A cell of a row of the prompt: one token with its text."""


def answer_bound(job: SampleJob) -> int:
    """In bytes. `job.max_tokens` must not be None."""
    assert job.max_tokens is not None
    sequences, prompt = 1 if job.greedy else job.num_samples, len(job.prompt)
    sampled = sequences * job.max_tokens * (SAMPLED_TOKEN_BYTES + job.topk_sample * SAMPLED_CELL_BYTES)
    cells = 0
    if job.wants_prompt:
        scores = prompt_scores(job)
        cells = prompt * (1 + job.topk_prompt) + (0 if scores is None else scores.appended(prompt))
    echoed = sequences * (SEQUENCE_BYTES + prompt * ECHOED_TOKEN_BYTES)
    return min(MAX_ANSWER_BYTES, BASE_BYTES + echoed + sampled + cells * PROMPT_CELL_BYTES)
