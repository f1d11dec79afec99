"""SGLang's `/generate`: reads the body, samples, and writes the answer or the stream of events.

`TokenTexts` asks vLLM for the text of single token ids. It remembers texts, because logprobs name the same tokens again
and again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from skyrl.http.messages import Send, encoded, json_reply
from skyrl.inference.sidecar.call import EVENTS, Call, error_body
from skyrl.inference.sidecar.completion import Collected, finish_reason, meta_info
from skyrl.inference.sidecar.errors import SidecarError, VllmAway, VllmBroke
from skyrl.inference.sidecar.facts import KnownFacts, WeightVersion
from skyrl.inference.sidecar.generate_request import GenerateRequest, Logprobs, Prompt, read_generate
from skyrl.inference.sidecar.in_flight import InFlight, Sample
from skyrl.inference.sidecar.pictures import Pictures, PlacedPictures
from skyrl.inference.sidecar.sampling import Job, collect, new_tokens
from skyrl.inference.sidecar.vllm import Vllm

REMEMBERED = 300_000
"""More than the vocabularies of today's models have tokens."""
AT_A_TIME = 32


class TokenTexts:
    def __init__(self, vllm: Vllm) -> None:
        self._vllm = vllm
        self._texts: dict[int, str] = {}
        self._asking = asyncio.Semaphore(AT_A_TIME)

    def forget(self) -> None:
        """vLLM was away: the next one may have another tokenizer."""
        self._texts.clear()

    async def of(self, tokens: Iterable[int]) -> dict[int, str]:
        """The text of each of the tokens. Raises SidecarError."""
        wanted = {*tokens}
        if unknown := wanted - self._texts.keys():
            if len(self._texts) + len(unknown) > REMEMBERED:
                self._texts.clear()
                unknown = wanted
            async with asyncio.TaskGroup() as group:
                asked = {token: group.create_task(self._ask(token)) for token in unknown}
            self._texts |= {token: task.result() for token, task in asked.items()}
        return {token: self._texts[token] for token in wanted}

    async def _ask(self, token: int) -> str:
        async with self._asking:
            answer = await self._vllm.call("POST", "/detokenize", {"tokens": [token]})
        text = answer.get("prompt") if isinstance(answer, dict) else None
        if not isinstance(text, str):
            raise VllmBroke("vLLM's /detokenize answered no text")
        return text


T = TypeVar("T")


@dataclass(eq=False)
class Generation:
    vllm: Vllm
    facts: KnownFacts
    version: WeightVersion
    in_flight: InFlight
    pictures: Pictures

    def __post_init__(self) -> None:
        self._texts = TokenTexts(self.vllm)

    @asynccontextmanager
    async def _admitted(self, request: GenerateRequest) -> AsyncIterator[list[Job]]:
        """The request's samples, in flight during the body: all n of the first prompt, then those of the next. Raises
        SidecarError."""
        samples = [
            Sample(prompt.rid, name, bool(prompt.pictures))
            for prompt in request.prompts
            for name in prompt.sample_ids()
        ]
        self.in_flight.admit(samples)
        try:
            facts, jobs, rest = await self.facts.get(), [], iter(samples)
            prompts = await all_of(self._prompt(prompt, facts.root) for prompt in request.prompts)
            for prompt, (tokens, pictures) in zip(request.prompts, prompts, strict=True):
                wanted = new_tokens(prompt, len(tokens), facts.context)
                for child in range(prompt.sampling.n):
                    jobs.append(Job(request, prompt, tokens, child, wanted, next(rest), facts, pictures))
            yield jobs
        except (VllmAway, VllmBroke):
            self.facts.forget()
            self._texts.forget()
            raise
        finally:
            for sample in samples:
                self.in_flight.end(sample)

    async def whole(self, request: GenerateRequest) -> Any:
        """The answer: an object, or a list of objects, one for each sample. Raises SidecarError."""
        started = time.monotonic()

        async def sampled(job: Job) -> dict[str, Any]:
            collected = Collected()
            await self._collect(job, collected, lambda: None)
            return await self._answer(job, collected, await self.version.at_end(collected.versions), started)

        async with self._admitted(request) as jobs:
            answers = await all_of(map(sampled, jobs))
        return answers[0] if request.single else answers

    async def chunks(self, request: GenerateRequest) -> AsyncGenerator[Any]:
        """The chunks of the stream. Each has all that its sample has so far. What is sampled while the reader is busy
        comes in one chunk. Raises SidecarError."""
        started = time.monotonic()
        async with self._admitted(request) as jobs:
            version = await self.version.get()
            collecteds = [Collected() for _ in jobs]
            changed, news, ended = asyncio.Event(), set[int](), set[int]()

            def tell(index: int) -> None:
                news.add(index)
                changed.set()

            async def sample(index: int) -> None:
                try:
                    await self._collect(jobs[index], collecteds[index], lambda: tell(index))
                finally:
                    ended.add(index)
                    tell(index)

            tasks = [asyncio.create_task(sample(index)) for index in range(len(jobs))]
            unsent = len(jobs)
            try:
                while unsent:
                    await changed.wait()
                    changed.clear()
                    for index in sorted(news):
                        news.discard(index)
                        if index in ended:
                            await tasks[index]
                            version = await self.version.at_end(collecteds[index].versions)
                            unsent -= 1
                        elif collecteds[index].finish is not None:
                            continue  # the usage is still to come
                        chunk = await self._answer(jobs[index], collecteds[index], version, started)
                        yield chunk if request.single else chunk | {"index": index}
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _collect(self, job: Job, collected: Collected, changed: Callable[[], None]) -> None:
        try:
            await collect(job, self.vllm, self.in_flight, collected, changed)
        finally:
            self.in_flight.end(job.sample)

    async def _prompt(self, prompt: Prompt, model: str) -> tuple[list[int], PlacedPictures | None]:
        """The tokens that the model computes, and the prompt with its pictures; None if it has none."""
        tokens = await self._tokens(prompt)
        return await self.pictures.place(prompt.pictures, tokens, model) if prompt.pictures else (tokens, None)

    async def _tokens(self, prompt: Prompt) -> list[int]:
        """The prompt's tokens. vLLM adds the tokenizer's special tokens to a text, as SGLang does."""
        if not isinstance(prompt.tokens, str):
            return prompt.tokens
        body = {"prompt": prompt.tokens, "add_special_tokens": True}
        answer = await self.vllm.call("POST", "/tokenize", body)
        tokens = answer.get("tokens") if isinstance(answer, dict) else None
        if not isinstance(tokens, list) or not tokens or not all(type(token) is int for token in tokens):
            raise VllmBroke("vLLM's /tokenize answered no tokens")
        return tokens

    async def _answer(self, job: Job, collected: Collected, version: str | None, started: float) -> dict[str, Any]:
        finish = finish_reason(collected, aborted=job.sample.aborted.is_set(), scoring=job.scoring)
        texts = None
        if job.prompt.logprobs is not None and job.request.text_in_logprobs:
            texts = await self._texts.of(_named(job, collected))
        meta = meta_info(
            job.sample.id,
            finish,
            job.tokens,
            collected,
            version,
            started,
            logprobs=job.prompt.logprobs,
            texts=texts,
            experts_start=job.request.routed_experts_start,
            scoring=job.scoring,
            kept=job.prompt.sampling.kept,
        )
        if job.request.return_prompt_tokens:
            meta["prompt_token_ids"] = job.tokens
        output = [] if job.scoring else [*collected.tokens]
        return {"text": "" if job.scoring else collected.text, "output_ids": output, "meta_info": meta}


async def all_of(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results, in order. The first error cancels the others."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


def _named(job: Job, collected: Collected) -> set[int]:
    """The tokens whose text the logprobs need."""
    wanted = job.prompt.logprobs or Logprobs()
    named = {*job.tokens, *collected.tokens, *wanted.ids}
    named |= {token for row in collected.alternatives for _, token in (row if wanted.ids else row[: wanted.top])}
    return named | {token for row in collected.prompt or [] for token in row}


DONE = b"data: [DONE]\n\n"


async def generate(call: Call, generation: Generation) -> None:
    """Raises SidecarError if nothing has been answered yet, and ClientLeft."""
    request = read_generate(await call.whole_body())
    async with call.body.while_connected():
        if request.stream:
            await _stream(call.send, generation, request)
        else:
            await json_reply(200, await generation.whole(request)).send(call.send)


async def _stream(send: Send, generation: Generation, request: GenerateRequest) -> None:
    """An error before the first chunk is answered with its status: clients take a stream without chunks for a sample
    without tokens."""

    async def write(event: bytes, *, more: bool = True) -> None:
        await send({"type": "http.response.body", "body": event, "more_body": more})

    async with aclosing(generation.chunks(request)) as chunks:
        first = await anext(chunks)
        await send({"type": "http.response.start", "status": 200, "headers": EVENTS})
        await write(_event(first))
        try:
            async for chunk in chunks:
                await write(_event(chunk))
                await asyncio.sleep(0)  # let what vLLM has sent meanwhile become one chunk
        except SidecarError as error:
            await write(_event(error_body(error)))
    await write(DONE, more=False)


def _event(value: Any) -> bytes:
    return b"data: %s\n\n" % encoded(value)
