"""Sampling: number of samples, seeds, stops."""

from __future__ import annotations

import asyncio
from typing import Any

from tinker import types

from ..catalogue import feature
from ..user import User, both, refusal, wait

GROUP = "Sampling"
CONTEXT = 4096
"""The context length of the served model, in tokens."""


def sample(user: User, count: int = 1, **params: Any) -> list[Any]:
    """Sequences after PROMPT from the base model."""
    given: dict[str, Any] = {"max_tokens": 12} | params
    settings = types.SamplingParams(**given)
    sequences = list(wait(user.sampler.sample(user.prompt, count, settings)).sequences)
    assert len(sequences) == count
    return sequences


@feature(GROUP, "Several samples at once, each with the logprobs of its tokens.")
def samples_with_logprobs(user: User) -> None:
    params = types.SamplingParams(max_tokens=12, temperature=1.0, seed=1)
    for answer in both(user.sampler, "sample", user.prompt, 4, params):
        assert len(answer.sequences) == 4
        assert len({tuple(sequence.tokens) for sequence in answer.sequences}) > 1
        for sequence in answer.sequences:
            assert len(sequence.tokens) == len(sequence.logprobs) <= 12
            assert all(logprob <= 0 for logprob in sequence.logprobs)
            assert sequence.stop_reason in ("stop", "length")


@feature(GROUP, "A name for every sampled sequence.", needs=("types.SampledSequence(sequence_id)",))
def sequence_ids(user: User) -> None:
    names = [sequence.sequence_id for _ in range(2) for sequence in sample(user, 2)]
    assert all(names)
    assert len(set(names)) == 4


@feature(GROUP, "A seed repeats its samples; several from one seed differ.")
def seeds(user: User) -> None:
    def drawn(seed: int) -> list[list[int]]:
        return [list(sequence.tokens) for sequence in sample(user, 3, seed=seed, temperature=1.5, stop=[])]

    first = drawn(1)
    assert drawn(1) == first
    assert drawn(2) != first
    assert len({tuple(tokens) for tokens in first}) == 3
    assert drawn(2**63) == drawn(2**63)


@feature(GROUP, "Temperature 0 is greedy, for several samples too.")
def greedy(user: User) -> None:
    sequences = sample(user, 3, temperature=0.0, stop=[])
    assert [list(sequence.tokens) for sequence in sequences] == [user.greedy(user.sampler)] * 3
    assert sample(user, top_k=1, stop=[])[0].tokens == sequences[0].tokens
    assert sample(user, top_p=1e-6, stop=[])[0].tokens == sequences[0].tokens


@feature(GROUP, "`max_tokens` ends a sample; `stop=[]` lets nothing else end it.")
def max_tokens(user: User) -> None:
    for sequence in sample(user, 2, max_tokens=40, stop=[]):
        assert len(sequence.tokens) == 40
        assert sequence.stop_reason == "length"


@feature(GROUP, "Without `max_tokens`, as far as the context reaches.")
def no_max_tokens(user: User) -> None:
    prompt = types.ModelInput.from_ints([300] * (CONTEXT - 10))
    sequence = wait(user.sampler.sample(prompt, 1, types.SamplingParams(stop=[]))).sequences[0]
    assert len(sequence.tokens) == 10
    assert sequence.stop_reason == "length"


@feature(GROUP, "A stop token ends a sample and is its last token.")
def stop_tokens(user: User) -> None:
    whole = user.greedy(user.sampler)
    end = next(i for i in range(3, len(whole)) if whole[i] not in whole[:i])
    sequence = sample(user, temperature=0.0, stop=[whole[end], 511])[0]
    assert list(sequence.tokens) == whole[: end + 1]
    assert sequence.stop_reason == "stop"


@feature(GROUP, "Stop strings, one or several, also in the middle of a token.")
def stop_strings(user: User) -> None:
    whole = user.greedy(user.sampler)
    texts = [user.tokenizer.decode(whole[: i + 1]) for i in range(len(whole))]
    end = next(i for i in range(3, len(whole)) if len(texts[i]) > len(texts[i - 1]) + 1)
    stop = texts[end][len(texts[end - 1]) - 2 : -1]
    expected = next(i for i, text in enumerate(texts) if stop in text)
    for given in (stop, [stop, "never there"]):
        sequence = sample(user, temperature=0.0, stop=given)[0]
        assert list(sequence.tokens) == whole[: expected + 1]
        assert sequence.stop_reason == "stop"


@feature(GROUP, "Many samples at the same time, each the answer to its own prompt.")
def concurrent_samples(user: User) -> None:
    prompts = [types.ModelInput.from_ints(user.tokens[: 2 + number % 6]) for number in range(48)]
    params = types.SamplingParams(max_tokens=6, temperature=0.0, stop=[])
    alone = [wait(user.sampler.sample(prompt, 1, params)).sequences[0].tokens for prompt in prompts[:6]]
    pending = [user.sampler.sample(prompt, 1, params) for prompt in prompts]
    for number, answer in enumerate(pending):
        assert wait(answer).sequences[0].tokens == alone[number % 6]


@feature(GROUP, "An abandoned sample holds up nothing.")
def abandoned_sample(user: User) -> None:
    polls = "POST /api/v1/retrieve_future"
    sampler, prompt = user.sampler, user.prompt
    before = user.asked(polls)

    async def abandoned() -> bool:
        params = types.SamplingParams(max_tokens=3000, stop=[], temperature=1.0)
        sampling = asyncio.create_task(sampler.sample_async(prompt, 4, params))
        # The SDK cancels a sample by its id. Once the SDK polls for the result, it has the id.
        await asyncio.to_thread(user.wait_until_asked, polls, before + 1)
        sampling.cancel()
        await asyncio.wait([sampling])
        return sampling.cancelled()

    assert wait(abandoned())
    assert user.greedy(sampler)


@feature(GROUP, "Too long a prompt is refused with the field's name.", statuses=(400,))
def prompt_too_long(user: User) -> None:
    params = types.SamplingParams(max_tokens=4)
    long = types.ModelInput.from_ints([300] * (CONTEXT + 1))
    assert "prompt" in refusal(lambda: user.sampler.sample(long, 1, params))


@feature(GROUP, "Images, where the served model takes text only: refused.", refusal="takes text only", statuses=(400,))
def images(user: User) -> None:
    image = types.ImageChunk(data=b"\x89PNG\r\n", format="png", expected_tokens=4)
    prompt = types.ModelInput(chunks=[image, types.EncodedTextChunk(tokens=user.tokens)])
    wait(user.sampler.sample(prompt, 1, types.SamplingParams(max_tokens=4)))
