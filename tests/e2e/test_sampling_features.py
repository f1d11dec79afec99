"""All options of a sample, through the SDK on real vLLM, compared with transformers and PEFT in float32."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import pytest
import tinker
import torch
from tinker import types
from transformers import PreTrainedTokenizerBase

from skyrl.base.tiny.corpus import IM_END, chat_prompt
from skyrl.cli.demo.server import DemoServer

from .conftest import adapter_of, cross_entropy, train
from .reference import Reference

pytestmark = pytest.mark.vllm

TEXT = "The old fox watches the river at dawn. A quiet owl remembers the small horse near the mill."
MODELS = ("base", "unembed", "attention")
VOCAB, CONTEXT = 512, 4096
ATOL = 1e-4


@dataclass(frozen=True)
class Model:
    """A sampling client, and the reference for its numbers."""

    sampler: tinker.SamplingClient
    reference: Reference

    def sample(
        self, prompt: list[int], num_samples: int = 1, params: dict[str, Any] | None = None, **asked: Any
    ) -> types.SampleResponse:
        given = types.SamplingParams(**{"max_tokens": 1, **(params or {})})
        return self.sampler.sample(types.ModelInput.from_ints(prompt), num_samples, given, **asked).result()

    def greedy(self, prompt: list[int], stop: Any, max_tokens: int = 40) -> types.SampledSequence:
        params = {"temperature": 0.0, "max_tokens": max_tokens, "stop": stop}
        return self.sample(prompt, params=params).sequences[0]


@pytest.fixture(scope="module")
def client(server: DemoServer) -> Iterator[tinker.ServiceClient]:
    with tinker.ServiceClient(base_url=server.url, api_key="tml-features") as made:
        yield made


@pytest.fixture(scope="module")
def models(server: DemoServer, client: tinker.ServiceClient, tokenizer: PreTrainedTokenizerBase) -> dict[str, Model]:
    """The base model, and two adapters that differ much from it: one with an lm_head part, one on attention only."""
    made = {"base": Model(client.create_sampling_client(base_model="tiny").result(), Reference())}
    for name, unembed in (("unembed", True), ("attention", False)):
        trainer = client.create_lora_training_client(
            base_model="tiny", rank=4, seed=1, train_unembed=unembed, train_mlp=unembed
        ).result()
        train(trainer, [cross_entropy(tokenizer.encode(TEXT[::-1]))], 6, 2e-2)
        sampler = trainer.save_weights_and_get_sampling_client().result()
        made[name] = Model(sampler, Reference(adapter_of(server, sampler)))
    return made


@pytest.fixture(scope="module")
def base(models: dict[str, Model]) -> Model:
    return models["base"]


@pytest.fixture
def prompt(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    return tokenizer.encode(TEXT)


@pytest.fixture
def question(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """A prompt with an answer that ends by itself after about twenty tokens."""
    return tokenizer.encode(chat_prompt("sort: d,a,c,x,k,m,z,b,t"))


def close(given: Any, expected: Any) -> None:
    np.testing.assert_allclose(np.asarray(given, float), expected, rtol=0, atol=ATOL)


def random_ids(rows: int, columns: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB, (rows, columns))


def dense(ids: np.ndarray) -> types.TensorData:
    return types.TensorData.from_numpy(ids.astype(np.int64))


def sparse(ids: np.ndarray) -> types.TensorData:
    tensor = types.TensorData.from_torch_sparse(torch.from_numpy(ids), pad_value=-1)
    assert tensor.sparse_crow_indices is not None
    return tensor


def expected_targets(logprobs: np.ndarray, ids: np.ndarray) -> np.ndarray:
    return np.where(ids >= 0, np.take_along_axis(logprobs, ids.clip(0), 1), 0.0)


# Prompts


@pytest.mark.parametrize("name", MODELS)
def test_one_request_returns_all_values_for_a_prompt(models: dict[str, Model], prompt: list[int], name: str) -> None:
    model = models[name]
    ids = random_ids(len(prompt) - 1, 3)
    ids[::2, 1] = -1
    asked = {"include_prompt_logprobs": True, "topk_prompt_logprobs": 5, "prompt_alt_tokens_k": 4}
    answer = model.sample(prompt, target_prompt_logprobs=dense(ids), **asked)
    logprobs = model.reference.logprobs(prompt)

    given = answer.prompt_logprobs
    assert given is not None
    assert given[0] is None
    close(given[1:], model.reference.of_tokens(prompt))

    rows = answer.topk_prompt_logprobs
    assert rows is not None
    assert rows[0] is None
    for row, wanted in zip(rows[1:], logprobs, strict=True):
        assert row is not None
        best = np.argsort(-wanted)[:5]
        close([logprob for _, logprob in row], wanted[best])
        close([wanted[token] for token, _ in row], wanted[best])
        assert len({token for token, _ in row}) == 5

    targets = answer.target_prompt_logprobs
    assert targets is not None
    assert (targets.dtype, targets.shape, targets.sparse_crow_indices) == ("float32", [len(prompt) - 1, 3], None)
    close(targets.to_numpy(), expected_targets(logprobs, ids))

    drawn = answer.prompt_alt_tokens
    assert drawn is not None
    tokens = drawn.tokens.to_numpy()
    assert tokens.shape == drawn.logprobs.to_numpy().shape == (len(prompt) - 1, 4)
    assert (drawn.tokens.dtype, drawn.logprobs.dtype) == ("int64", "float32")
    close(drawn.logprobs.to_numpy(), np.take_along_axis(logprobs, tokens, 1))


def test_the_adapters_of_these_tests_differ_much(models: dict[str, Model], prompt: list[int]) -> None:
    """If the adapters were alike, the comparisons with the references would prove nothing."""
    scores = [models[name].reference.of_tokens(prompt) for name in MODELS]
    assert min(np.abs(a - b).max() for i, a in enumerate(scores) for b in scores[:i]) > 0.5


def test_sequences_and_prompt_values_of_one_request_are_independent(base: Model, prompt: list[int]) -> None:
    """The values for the prompt do not depend on `num_samples`, and the sequences do not depend on the values requested
    for the prompt."""
    params = {"max_tokens": 12, "seed": 11}
    targets = dense(random_ids(len(prompt) - 1, 2))
    asked = {"include_prompt_logprobs": True, "topk_prompt_logprobs": 5, "prompt_alt_tokens_k": 3}
    both = base.sample(prompt, 4, params, target_prompt_logprobs=targets, **asked)
    one = base.sample(prompt, 1, params, target_prompt_logprobs=targets, **asked)
    alone = base.sample(prompt, 4, params)
    assert [each.stop_reason for each in both.sequences] == [each.stop_reason for each in alone.sequences]
    found, of_one, of_alone = numbers(both), numbers(one), numbers(alone)
    assert {"tokens 3", "prompt", "prompt topk", "targets", "drawn", "drawn logprobs"} <= found.keys()
    assert of_one.keys() | of_alone.keys() == found.keys()
    for key, value in [*of_one.items(), *of_alone.items()]:
        np.testing.assert_allclose(found[key], value, rtol=0, atol=ATOL, err_msg=key)


def test_targets_are_returned_in_the_layout_of_the_request(base: Model, prompt: list[int]) -> None:
    ids = np.full((len(prompt) - 1, 40), -1)
    ids[3, 7], ids[-1, :] = 11, np.arange(40)
    asked = sparse(ids)
    answer = base.sample(prompt, target_prompt_logprobs=asked).target_prompt_logprobs
    assert answer is not None
    assert answer.sparse_crow_indices == asked.sparse_crow_indices
    assert answer.sparse_col_indices == asked.sparse_col_indices
    assert answer.shape == asked.shape
    logprobs = base.reference.logprobs(prompt)
    close(answer.to_numpy(), expected_targets(logprobs, ids))


def test_targets_may_have_empty_cells_and_rows_with_the_whole_vocabulary(base: Model, prompt: list[int]) -> None:
    rows = len(prompt) - 1
    one = types.TensorData(
        data=[-1, 9],
        dtype="int64",
        shape=[rows, 2],
        sparse_crow_indices=[0, 2] + [2] * (rows - 1),
        sparse_col_indices=[0, 1],
    )
    answer = base.sample(prompt, target_prompt_logprobs=one).target_prompt_logprobs
    assert answer is not None
    assert answer.data == pytest.approx([0.0, base.reference.logprobs(prompt)[0, 9]], abs=ATOL)
    everything = np.full((rows, VOCAB), -1)
    everything[-1] = np.arange(VOCAB)
    answer = base.sample(prompt, target_prompt_logprobs=sparse(everything)).target_prompt_logprobs
    assert answer is not None
    close(np.exp(np.asarray(answer.data)).sum(), 1.0)


def test_the_last_n_limit_logprobs_and_topk_only(base: Model, prompt: list[int]) -> None:
    ids = random_ids(len(prompt) - 1, 1)
    answer = base.sample(
        prompt,
        include_prompt_logprobs=True,
        topk_prompt_logprobs=2,
        prompt_logprobs_last_n=3,
        target_prompt_logprobs=dense(ids),
        prompt_alt_tokens_k=1,
    )
    assert answer.prompt_logprobs is not None
    assert [value is None for value in answer.prompt_logprobs] == [True] * (len(prompt) - 3) + [False] * 3
    close(answer.prompt_logprobs[-3:], base.reference.of_tokens(prompt)[-3:])
    assert answer.topk_prompt_logprobs is not None
    assert [row is None for row in answer.topk_prompt_logprobs] == [True] * (len(prompt) - 3) + [False] * 3
    assert answer.target_prompt_logprobs is not None
    expected = expected_targets(base.reference.logprobs(prompt), ids)
    close(answer.target_prompt_logprobs.to_numpy(), expected)
    assert answer.prompt_alt_tokens is not None
    assert answer.prompt_alt_tokens.tokens.shape == [len(prompt) - 1, 1]


def test_prompt_logprobs_cover_the_whole_prompt_even_if_its_beginning_is_cached(base: Model) -> None:
    long = random_ids(1, 300, seed=1)[0].tolist()
    base.sample(long)
    assert base.sample(long).prompt_cache_hit_tokens > 0
    ids = random_ids(299, 1)
    answer = base.sample(long, include_prompt_logprobs=True, target_prompt_logprobs=dense(ids))
    assert answer.prompt_cache_hit_tokens == 0
    assert answer.prompt_logprobs is not None
    close(answer.prompt_logprobs[1:], base.reference.of_tokens(long))
    assert answer.target_prompt_logprobs is not None
    expected = expected_targets(base.reference.logprobs(long), ids)
    close(answer.target_prompt_logprobs.to_numpy(), expected)


def test_a_prompt_of_one_token_has_no_alternatives(base: Model) -> None:
    answer = base.sample([5], include_prompt_logprobs=True, prompt_alt_tokens_k=3)
    assert answer.prompt_logprobs == [None]
    assert answer.prompt_alt_tokens is not None
    assert answer.prompt_alt_tokens.tokens.to_numpy().shape == (0, 3)


# Alternatives


def alternatives(model: Model, prompt: list[int], k: int, num_samples: int = 1, **params: Any) -> np.ndarray:
    drawn = model.sample(prompt, num_samples, params, prompt_alt_tokens_k=k).prompt_alt_tokens
    assert drawn is not None
    return drawn.tokens.to_numpy()


def test_alternatives_are_the_best_token_at_temperature_zero(base: Model, prompt: list[int]) -> None:
    best = base.reference.logprobs(prompt).argmax(1)
    assert (alternatives(base, prompt, 3, num_samples=2, temperature=0.0) == best[:, None]).all()


def test_alternatives_are_repeatable_by_seed(base: Model, prompt: list[int]) -> None:
    first = alternatives(base, prompt, 4, seed=2**64 - 1)
    assert (alternatives(base, prompt, 4, seed=2**64 - 1, num_samples=3) == first).all()
    assert (alternatives(base, prompt, 4, seed=8) != first).any()
    assert (alternatives(base, prompt, 4) != alternatives(base, prompt, 4)).any()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_alternatives_follow_the_distribution_at_their_temperature(base: Model, temperature: float) -> None:
    """For every position, the mean logprob of many draws equals its expectation within five standard errors."""
    prompt = random_ids(1, 9, seed=3)[0].tolist()
    drawn = np.concatenate(
        [alternatives(base, prompt, 64, seed=seed, temperature=temperature) for seed in range(8)], axis=1
    )
    scores = base.reference.logprobs(prompt)
    chances = np.exp(base.reference.logprobs(prompt, temperature))
    mean = (chances * scores).sum(1)
    spread = np.sqrt((chances * (scores - mean[:, None]) ** 2).sum(1))
    given = np.take_along_axis(scores, drawn, 1).mean(1)
    assert (np.abs(given - mean) < 5 * spread / np.sqrt(drawn.shape[1])).all()
    assert np.median(spread) > 0.2


# Sampled tokens


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0, 5.0])
def test_logprobs_are_of_the_distribution_at_the_temperature(
    models: dict[str, Model], prompt: list[int], name: str, temperature: float
) -> None:
    model = models[name]
    params = {"max_tokens": 8, "temperature": temperature, "stop": [], "seed": 4}
    answer = model.sample(prompt, 2, params, topk_sample_logprobs=3)
    for sequence in answer.sequences:
        tokens = prompt + list(sequence.tokens)
        scores = model.reference.logprobs(tokens, temperature)[len(prompt) - 1 :]
        expected = np.take_along_axis(scores, np.asarray(sequence.tokens)[:, None], 1)[:, 0]
        close(sequence.logprobs, expected)
        assert sequence.topk_logprobs is not None
        for row, wanted in zip(sequence.topk_logprobs, scores, strict=True):
            assert row is not None
            close([logprob for _, logprob in row], -np.sort(-wanted)[:3])


@pytest.mark.parametrize(("cut", "value"), [("top_k", 3), ("top_p", 0.6)])
def test_logprobs_are_of_the_distribution_after_top_k_and_top_p(
    base: Model, prompt: list[int], cut: str, value: float
) -> None:
    params = {"max_tokens": 8, "stop": [], "seed": 4, cut: value}
    (sequence,) = base.sample(prompt, 1, params, topk_sample_logprobs=8).sequences
    chances = np.exp(base.reference.logprobs(prompt + list(sequence.tokens))[len(prompt) - 1 :])
    assert sequence.topk_logprobs is not None
    assert sequence.logprobs is not None
    for step, row in enumerate(sequence.topk_logprobs):
        order = np.argsort(-chances[step])
        kept = order[:3] if cut == "top_k" else order[: 1 + int((np.cumsum(chances[step][order]) < value).sum())]
        expected = np.log(chances[step][kept] / chances[step][kept].sum())
        assert row is not None
        close([logprob for _, logprob in row], expected[:8])
        assert np.isclose(sequence.logprobs[step], dict(row)[sequence.tokens[step]]) or len(kept) > 8


def test_a_top_k_of_zero_or_minus_one_is_off(base: Model, prompt: list[int]) -> None:
    def tokens(**params: Any) -> list[int]:
        return list(base.sample(prompt, 1, {"max_tokens": 16, "seed": 1, "stop": [], **params}).sequences[0].tokens)

    free = tokens()
    assert tokens(top_k=0) == tokens(top_k=-1) == free
    assert tokens(top_k=1) != free


@pytest.mark.parametrize("seed", [0, 2**63 - 1, 2**63, 2**64 - 1])
def test_64_bit_seeds_give_distinct_repeatable_groups(base: Model, prompt: list[int], seed: int) -> None:
    def group() -> list[tuple[int, ...]]:
        answer = base.sample(prompt, 4, {"max_tokens": 12, "seed": seed, "stop": []})
        return [tuple(sequence.tokens) for sequence in answer.sequences]

    first = group()
    assert len(set(first)) == 4
    assert group() == first


def test_all_samples_of_a_greedy_group_are_equal(base: Model, prompt: list[int]) -> None:
    params = {"temperature": 0.0, "max_tokens": 6, "stop": []}
    answer = base.sample(prompt, 3, params, include_prompt_logprobs=True, topk_sample_logprobs=2)
    assert len(answer.sequences) == 3
    assert len({(*sequence.tokens,) for sequence in answer.sequences}) == 1
    tokens = list(answer.sequences[0].tokens)
    best = base.reference.logits(prompt + tokens)[len(prompt) - 1 : -1].argmax(-1).tolist()
    assert tokens == best
    close(answer.sequences[2].logprobs, base.reference.of_tokens(prompt + tokens)[len(prompt) - 1 :])


@pytest.mark.parametrize("max_tokens", [None, 50, CONTEXT, 10**9])
def test_a_sample_ends_at_the_end_of_the_context(base: Model, max_tokens: int | None) -> None:
    long = random_ids(1, CONTEXT - 20, seed=2)[0].tolist()
    answer = base.sample(long, 1, {"max_tokens": max_tokens, "stop": []})
    assert len(answer.sequences[0].tokens) == 20
    assert answer.sequences[0].stop_reason == "length"


# Stops


def test_without_stops_only_the_end_of_the_turn_ends_a_sample(
    base: Model, question: list[int], tokenizer: PreTrainedTokenizerBase
) -> None:
    ended = base.greedy(question, None)
    assert ended.stop_reason == "stop"
    assert ended.tokens[-1] == tokenizer.convert_tokens_to_ids(IM_END)
    assert list(ended.tokens).count(ended.tokens[-1]) == 1
    assert ended.logprobs is not None
    assert len(ended.logprobs) == len(ended.tokens)
    endless = base.greedy(question, [])
    assert (endless.stop_reason, len(endless.tokens)) == ("length", 40)
    assert list(endless.tokens)[: len(ended.tokens)] == list(ended.tokens)
    # A renderer for base models stops at the first words of the next turn; the end of the turn ends the sample too.
    assert list(base.greedy(question, ["\n\nUser:"]).tokens) == list(ended.tokens)
    assert list(base.greedy(question, [511]).tokens) == list(ended.tokens)


# Many samples at once


def test_64_mixed_requests_give_the_same_numbers_as_alone(models: dict[str, Model]) -> None:
    rng = Random(5)

    def made(number: int) -> tuple[str, list[int], int, dict[str, Any], dict[str, Any]]:
        prompt = [rng.randrange(VOCAB) for _ in range(rng.choice((2, 9, 40, 150)))]
        params = {
            "max_tokens": rng.choice((1, 6)),
            "temperature": (1.0, 0.0, 0.7, 3.0)[number % 4],
            "seed": number,
            "stop": [],
        }
        asked: dict[str, Any] = {}
        if number % 2:
            asked["include_prompt_logprobs"] = True
        if number % 3 == 0:
            asked["topk_prompt_logprobs"] = rng.choice((1, 4))
        if number % 3 == 1:
            ids = random_ids(len(prompt) - 1, 2, seed=number)
            ids[0, 0] = -1
            asked["target_prompt_logprobs"] = dense(ids)
        if number % 5 < 2:
            asked["prompt_alt_tokens_k"] = 3
        if number % 7 == 0:
            asked["topk_sample_logprobs"] = 2
        return MODELS[number % 3], prompt, 1 + number % 2, params, asked

    requests = [made(number) for number in range(64)]

    def ask(request: tuple[str, list[int], int, dict[str, Any], dict[str, Any]]) -> dict[str, Any]:
        name, prompt, num_samples, params, asked = request
        return numbers(models[name].sample(prompt, num_samples, params, **asked))

    alone = [ask(request) for request in requests]
    with ThreadPoolExecutor(64) as pool:
        together = list(pool.map(ask, requests))
    for one, other in zip(alone, together, strict=True):
        assert one.keys() == other.keys()
        for key, value in one.items():
            np.testing.assert_allclose(other[key], value, atol=1e-4, err_msg=key)


def numbers(answer: types.SampleResponse) -> dict[str, Any]:
    """Every number of an answer; missing numbers are NaN."""
    found: dict[str, Any] = {}
    for index, sequence in enumerate(answer.sequences):
        found[f"tokens {index}"], found[f"logprobs {index}"] = sequence.tokens, sequence.logprobs
        if sequence.topk_logprobs is not None:
            found[f"topk {index}"] = sequence.topk_logprobs
    if answer.prompt_logprobs_np is not None:
        found["prompt"] = answer.prompt_logprobs_np
    if answer.topk_prompt_logprobs is not None:
        found["prompt topk"] = answer.topk_prompt_logprobs[1:]
    if answer.target_prompt_logprobs is not None:
        found["targets"] = answer.target_prompt_logprobs.data
    if answer.prompt_alt_tokens is not None:
        found["drawn"] = answer.prompt_alt_tokens.tokens.data
        found["drawn logprobs"] = answer.prompt_alt_tokens.logprobs.data
    return found


# Clients without protobuf
