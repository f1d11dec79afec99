"""Logprobs of prompts, of alternatives and of sampled tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
from tinker import types

from ..catalogue import feature
from ..user import User, both, same, tensor, wait

GROUP = "Logprobs"


def ask(user: User, **kwargs: Any) -> Any:
    """One greedy sample after TEXT; `kwargs` request values for the prompt."""
    params = types.SamplingParams(max_tokens=2, temperature=0.0, stop=[])
    return wait(user.sampler.sample(types.ModelInput.from_ints(user.tokens), 1, params, **kwargs))


@feature(GROUP, "`compute_logprobs` gives one per token, the trainer's, and none for the first.")
def compute_logprobs(user: User) -> None:
    for scored in both(user.sampler, "compute_logprobs", types.ModelInput.from_ints(user.tokens)):
        assert scored[0] is None
        assert same(scored[1:], user.scores(user.model))


@feature(GROUP, "Only of the last n tokens.", needs=("SamplingClient.compute_logprobs(prompt_logprobs_last_n)",))
def logprobs_of_the_last_n(user: User) -> None:
    whole = user.prompt_logprobs(user.sampler)
    prompt = types.ModelInput.from_ints(user.tokens)
    scored = wait(user.sampler.compute_logprobs(prompt, prompt_logprobs_last_n=3))
    assert scored[:-3] == [None] * (len(user.tokens) - 3)
    assert same(scored[-3:], whole[-3:], 1e-5)
    answer = ask(user, include_prompt_logprobs=True, topk_prompt_logprobs=2, prompt_logprobs_last_n=3)
    assert same(answer.prompt_logprobs[-3:], whole[-3:], 1e-5)
    assert [row is None for row in answer.topk_prompt_logprobs] == [True] * (len(user.tokens) - 3) + [False] * 3


@feature(GROUP, "With a sample, of its prompt.")
def prompt_logprobs(user: User) -> None:
    answer = ask(user, include_prompt_logprobs=True)
    assert answer.prompt_logprobs[0] is None
    assert same(answer.prompt_logprobs[1:], user.prompt_logprobs(user.sampler), 1e-5)
    assert ask(user).prompt_logprobs is None


@feature(GROUP, "The k likeliest tokens at every position of the prompt.")
def topk_prompt_logprobs(user: User) -> None:
    rows = ask(user, include_prompt_logprobs=True, topk_prompt_logprobs=5).topk_prompt_logprobs
    assert len(rows) == len(user.tokens)
    assert rows[0] is None
    whole = user.prompt_logprobs(user.sampler)
    for row, token, logprob in zip(rows[1:], user.tokens[1:], whole, strict=True):
        values = [value for _, value in row]
        assert len(row) == 5
        assert values == sorted(values, reverse=True)
        assert dict(row).get(token, logprob) == logprob or same(dict(row)[token], logprob, 1e-5)


@feature(
    GROUP, "The k likeliest tokens at every sampled position.", needs=("SamplingClient.sample(topk_sample_logprobs)",)
)
def topk_sample_logprobs(user: User) -> None:
    sequence = ask(user, topk_sample_logprobs=3).sequences[0]
    assert len(sequence.topk_logprobs) == len(sequence.tokens)
    for row, token, logprob in zip(sequence.topk_logprobs, sequence.tokens, sequence.logprobs, strict=True):
        assert len(row) == 3
        assert row[0][0] == token
        assert same(row[0][1], logprob, 1e-5)
        assert row[0][1] >= row[1][1] >= row[2][1]


@feature(
    GROUP,
    "Of chosen tokens at every position of the prompt.",
    needs=("SamplingClient.sample(target_prompt_logprobs)",),
)
def target_prompt_logprobs(user: User) -> None:
    following = np.asarray(user.tokens[1:], np.int64)
    targets = np.stack([following, np.full_like(following, -1), np.full_like(following, 301)], axis=1)
    answer = ask(user, target_prompt_logprobs=tensor(targets, np.int64)).target_prompt_logprobs.to_numpy()
    assert answer.shape == targets.shape
    assert same(answer[:, 0], user.prompt_logprobs(user.sampler), 1e-5)
    assert np.all(answer[:, 1] == 0.0)
    other = user.tokens[:-1]
    for row in (0, len(other) - 1):
        swapped = types.ModelInput.from_ints([*other[: row + 1], 301])
        assert same(answer[row, 2], wait(user.sampler.compute_logprobs(swapped))[-1], 1e-4)


@feature(
    GROUP,
    "The same in a sparse (CSR) tensor; the answer has its layout.",
    needs=("SamplingClient.sample(target_prompt_logprobs)",),
)
def sparse_target_prompt_logprobs(user: User) -> None:
    rows = len(user.tokens) - 1
    chosen = types.TensorData(
        data=[user.tokens[1], 301, user.tokens[rows]],
        dtype="int64",
        shape=[rows, 2],
        sparse_crow_indices=[0, 2, *[2] * (rows - 2), 3],
        sparse_col_indices=[0, 1, 1],
    )
    answer = ask(user, target_prompt_logprobs=chosen).target_prompt_logprobs
    assert answer.sparse_crow_indices == chosen.sparse_crow_indices
    assert answer.sparse_col_indices == chosen.sparse_col_indices
    whole = user.prompt_logprobs(user.sampler)
    assert same([answer.data[0], answer.data[2]], [whole[0], whole[-1]], 1e-5)


@feature(
    GROUP,
    "Drawn alternatives to every token of the prompt, with their logprobs.",
    needs=("SamplingClient.sample(prompt_alt_tokens_k)",),
)
def prompt_alternatives(user: User) -> None:
    drawn = ask(user, prompt_alt_tokens_k=3).prompt_alt_tokens
    tokens, logprobs = drawn.tokens.to_numpy(), drawn.logprobs.to_numpy()
    assert tokens.shape == logprobs.shape == (len(user.tokens) - 1, 3)
    scored = ask(user, target_prompt_logprobs=tensor(tokens, np.int64)).target_prompt_logprobs.to_numpy()
    assert same(scored, logprobs, 1e-4)


@feature(GROUP, "Of sampled tokens they are those of the tempered distribution.")
def tempered_logprobs(user: User) -> None:
    prompt = user.prompt
    for temperature in (1.0, 0.5):
        params = types.SamplingParams(max_tokens=1, temperature=temperature, stop=[], seed=3)
        answer = wait(user.sampler.sample(prompt, 1, params, include_prompt_logprobs=True, topk_prompt_logprobs=0))
        token, logprob = answer.sequences[0].tokens[0], answer.sequences[0].logprobs[0]
        plain = distribution(user, prompt)
        scaled = plain / temperature
        assert same(logprob, scaled[token] - np.log(np.exp(scaled).sum()), 2e-3)


def distribution(user: User, prompt: types.ModelInput) -> np.ndarray:
    """float64 [vocabulary]: logprobs of every next token, from one forward pass with all tokens as targets."""
    tokens = prompt.to_ints()
    size = len(user.tokenizer)
    targets = np.zeros((len(tokens), size), np.int64)
    targets[-1] = np.arange(size)
    inputs = {"target_tokens": tensor(targets, np.int64), "weights": tensor(np.zeros_like(targets))}
    output = wait(user.model.forward([types.Datum(model_input=prompt, loss_fn_inputs=inputs)], "cross_entropy"))
    return np.asarray(output.loss_fn_outputs[0]["logprobs"].to_numpy(), np.float64)[-1]
