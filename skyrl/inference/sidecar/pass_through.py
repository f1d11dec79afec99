"""Requests that are not the sidecar's own go to vLLM as they are, and vLLM's answers to the client, in both directions
as they come. Bodies of requests that sample are read before: `openai_request` says which fields must not pass.

`OpenaiAnswers` adds to vLLM's answers to completions and chats what SGLang's clients ask for: `meta_info` in each
choice. It checks that vLLM has sampled after the prompt that the client gave."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterable, AsyncIterator, Collection
from contextlib import closing
from typing import Any

import msgspec

from skyrl.http.client import AnswerStream
from skyrl.http.connection import Interrupted
from skyrl.inference.sidecar.call import Call, HeaderList, compact
from skyrl.inference.sidecar.completion import Collected, basics, finish_reason, logprob_lists, routed_experts
from skyrl.inference.sidecar.errors import BadRequest, ClientLeft, VllmBroke, VllmInterrupted
from skyrl.inference.sidecar.facts import KnownFacts, WeightVersion
from skyrl.inference.sidecar.generate_request import Logprobs
from skyrl.inference.sidecar.in_flight import InFlight
from skyrl.inference.sidecar.openai_request import INVOCATIONS, OF_VLLM, OpenaiRequest, read_openai
from skyrl.inference.sidecar.vllm import Vllm

MAX_FIRST_EVENT = 8 * 2**20
"""Bytes of a stream before the event that tells its prompt."""
TOOL_CALLS = "tool_calls"
_THEIR_NAMES = (b"`kv_transfer_params['prompt_token_ids']`", b"kv_transfer_params.prompt_token_ids")


class OpenaiAnswers:
    def __init__(self, facts: KnownFacts, version: WeightVersion) -> None:
        self._facts = facts
        self._version = version

    async def check_length(self, request: OpenaiRequest) -> None:
        """Raises BadRequest, with SGLang's words, for a prompt of ids that leaves no room; other SidecarErrors."""
        if request.given_tokens and request.given_tokens >= (context := (await self._facts.get()).context):
            raise BadRequest(
                f"The input ({request.given_tokens} tokens) is longer than the model's context length ({context} "
                "tokens)."
            )

    async def whole(self, request: OpenaiRequest, body: bytes, started: float) -> bytes:
        """The whole answer with what was asked for. Raises VllmBroke if vLLM's does not have it."""
        answer = _decoded(body)
        choices, usage = answer.get("choices"), answer.get("usage")
        if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
            raise VllmBroke("vLLM's answer has no choices")
        of_chat = answer.pop("prompt_token_ids", None)
        for number, choice in enumerate(choices):
            prompt = of_chat or choice.pop("prompt_token_ids", None)
            if not isinstance(prompt, list):
                raise VllmBroke("vLLM's answer has no prompt_token_ids")
            if request.tokens not in (None, prompt):
                raise VllmBroke("vLLM did not sample after input_ids")
            if request.meta_info:
                collected = _collected(choice, usage, request.logprobs, len(prompt))
                name = f"{answer.get('id')}-{number}" if len(choices) > 1 else str(answer.get("id"))
                choice["meta_info"] = await self._meta_info(request, name, choice, prompt, collected, started)
                _as_sglangs(choice.get("message"))
            if not request.keeps_ids:
                choice.pop("token_ids", None)
            if request.prompt_ids or (request.keeps_ids and of_chat is None):
                choice["prompt_token_ids"] = prompt
        if request.keeps_ids and of_chat is not None:
            answer["prompt_token_ids"] = of_chat
        return compact(answer)

    async def _meta_info(
        self,
        request: OpenaiRequest,
        name: str,
        choice: dict[str, Any],
        prompt: list[int],
        collected: Collected,
        started: float,
    ) -> dict[str, Any]:
        finish = finish_reason(collected, aborted=False, scoring=False)
        if choice.get("finish_reason") == TOOL_CALLS:
            finish = {"type": TOOL_CALLS, "matched": None}
        version = await self._version.at_end(collected.versions)
        meta = basics(name, finish, len(prompt), collected, version, started)
        if request.logprobs:
            meta |= logprob_lists(Logprobs(), collected, prompt, None, scoring=False)
        if request.routed_experts_start is not None:
            meta |= routed_experts(
                collected.routed_experts,
                len(prompt),
                len(collected.tokens),
                request.routed_experts_start,
                aborted=collected.finish == "abort",
            )
        return meta


async def checked(chunks: AsyncIterable[bytes], tokens: list[int]) -> bytes:
    """The beginning of a stream, up to the event that tells its prompt, or to an event without a sample. Raises
    VllmBroke if the prompt is another one."""
    begun = b""
    async for chunk in chunks:
        begun += chunk
        for line in begun.split(b"\n")[:-1]:
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            event = {} if data == b"[DONE]" else _decoded(data)
            if event.get("choices") and event.get("prompt_token_ids") != tokens:
                raise VllmBroke("vLLM did not sample after input_ids")
            return begun
        if len(begun) > MAX_FIRST_EVENT:
            raise VllmBroke(f"vLLM's stream has no event in its first {MAX_FIRST_EVENT} bytes")
    return begun


def in_our_words(error: bytes) -> bytes:
    """An error of vLLM with the name of the field that the client has sent."""
    for name in _THEIR_NAMES:
        error = error.replace(name, b"input_ids")
    return error


def _decoded(body: bytes) -> dict[str, Any]:
    try:
        answer = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise VllmBroke(f"vLLM's answer is not JSON: {error}") from error
    if not isinstance(answer, dict):
        raise VllmBroke("vLLM's answer is no object")
    return answer


def _collected(choice: dict[str, Any], usage: Any, logprobs: bool, prompt_tokens: int) -> Collected:
    """A choice, in the form in which a completion without alternatives has it. Raises VllmBroke."""
    given = choice.get("logprobs")
    if isinstance(given, dict) and "content" in given:  # of a chat
        rows = given["content"] if isinstance(given["content"], list) else []
        values = [row.get("logprob") if isinstance(row, dict) else None for row in rows]
    else:
        values = given.get("token_logprobs") if isinstance(given, dict) else None
    if choice.get("token_ids") is None:
        raise VllmBroke("vLLM's answer has no token_ids")
    rows = [{} for _ in values] if isinstance(values, list) else None
    one = choice | {"index": 0, "text": "", "logprobs": {"token_logprobs": values, "top_logprobs": rows}}
    if choice.get("finish_reason") == TOOL_CALLS:
        one["finish_reason"] = "stop"
    if isinstance(usage, dict) and usage.get("prompt_tokens") != prompt_tokens:  # of several prompts
        usage = {"prompt_tokens": prompt_tokens}
    collected = Collected()
    collected.add_answer({"choices": [one], "usage": usage}, logprobs=logprobs, prompt=None)
    return collected


def _as_sglangs(message: Any) -> None:
    """SGLang's clients append the message to the conversation, and want a text in it."""
    if isinstance(message, dict):
        if message.get("content") is None:
            message["content"] = ""
        if message.get("reasoning") is not None:
            message.setdefault("reasoning_content", message["reasoning"])


HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
SAMPLING = frozenset(
    {
        *("/v1/completions", "/v1/chat/completions", "/v1/chat/completions/batch", "/v1/responses", "/v1/messages"),
        *("/v1/audio/transcriptions", "/v1/audio/translations", "/v1/systemone"),
        *("/cohere/v2/chat", "/generative_scoring", "/inference/v1/generate", "/invocations"),
    }
)
"""Paths that count as in flight."""


async def pass_through(call: Call, vllm: Vllm, in_flight: InFlight, answers: OpenaiAnswers) -> None:
    """Requests that sample wait while generation is paused. Raises ClientLeft, and SidecarError if nothing has been
    answered yet."""
    samples = call.method == "POST" and call.path in SAMPLING
    request = None
    if samples and (call.path in OF_VLLM or call.path == INVOCATIONS):
        request = read_openai(call.path, await call.body())
        await answers.check_length(request)
    body = _Body(call, request)
    exchange = _Exchange(call, vllm, body, answers)
    forwarding = asyncio.ensure_future(_when_generating(exchange, in_flight) if samples else exchange.forward())
    leaving = asyncio.ensure_future(body.client_left())
    try:
        await asyncio.wait({forwarding, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not forwarding.done():
            raise ClientLeft
        forwarding.result()
    finally:
        forwarding.cancel()
        leaving.cancel()
        await asyncio.wait({forwarding, leaving})


async def _when_generating(exchange: _Exchange, in_flight: InFlight) -> None:
    if not in_flight.gate.is_open:
        await exchange.body.keep()
    async with in_flight.passing():
        await exchange.forward()


class _Body:
    """The body of a request, as vLLM's client reads it. `request`: it was read and checked."""

    def __init__(self, call: Call, request: OpenaiRequest | None) -> None:
        self._call = call
        self._read = asyncio.Event()
        self.request = request
        self._kept: bytes | None = None
        names = {name.lower(): value for name, value in call.scope["headers"]}
        self.given = b"transfer-encoding" in names or names.get(b"content-length", b"0") != b"0"
        if request is not None:
            self._keep(request.body)

    async def keep(self) -> None:
        """Read the whole body now: only then a client that leaves is seen. Raises TooLarge, ClientLeft."""
        if self._kept is None:
            self._keep(await self._call.body())

    def _keep(self, body: bytes) -> None:
        self._kept = body
        self._read.set()

    def data(self) -> bytes | AsyncIterator[bytes]:
        if not self.given:
            return b""
        return self._chunks() if self._kept is None else self._kept

    async def _chunks(self) -> AsyncIterator[bytes]:
        async for chunk in self._call.body_chunks():
            yield chunk
        self._read.set()

    async def client_left(self) -> None:
        """Wait until the client leaves. Whoever reads the body sees it until then."""
        if self.given:
            await self._read.wait()
        await self._call.left()


class _Exchange:
    """A request's way to vLLM, and the way of its answer back."""

    def __init__(self, call: Call, vllm: Vllm, body: _Body, answers: OpenaiAnswers) -> None:
        self._call = call
        self._vllm = vllm
        self._answers = answers
        self.body = body

    async def forward(self) -> None:
        started = time.monotonic()
        with closing(await self._asked()) as response:
            try:
                request = self.body.request
                if request is None or request.is_plain:
                    await self._pass(response, b"")
                elif response.status != 200:
                    await self._answer(response, in_our_words(await self._vllm.read(response)))
                elif request.stream:
                    assert request.tokens is not None  # all else is refused for streams
                    await self._pass(response, await checked(response, request.tokens))
                else:
                    whole = await self._vllm.read(response)
                    await self._answer(response, await self._answers.whole(request, whole, started))
            except Interrupted as error:
                raise VllmInterrupted(f"vLLM's answer broke: {error}") from error

    async def _asked(self) -> AnswerStream:
        call, vllm = self._call, self._vllm
        path: bytes = call.scope.get("raw_path") or call.path.encode()
        target = b"%s?%s" % (path, call.query) if call.query else path
        headers = _request_headers(call.scope["headers"], vllm, self.body.request)
        return await vllm.open(call.method, target, headers, self.body.data())

    async def _pass(self, response: AnswerStream, begun: bytes) -> None:
        """`begun`: what was read of the answer's body before."""
        await self._call.start(response.status, _answer_headers(response, HOP_BY_HOP))
        if begun:
            await self._call.write(begun, more=True)
        async for chunk in response:
            await self._call.write(chunk, more=True)
        await self._call.write(b"", more=False)

    async def _answer(self, response: AnswerStream, body: bytes) -> None:
        """An answer with another body than vLLM's."""
        await self._call.answer(response.status, body, _answer_headers(response, HOP_BY_HOP | {b"content-length"}))


def _answer_headers(response: AnswerStream, left_out: Collection[bytes]) -> HeaderList:
    return [pair for pair in response.headers if pair[0] not in left_out]


def _request_headers(given: HeaderList, vllm: Vllm, request: OpenaiRequest | None) -> HeaderList:
    """A key of the client's is for this server; vLLM gets its own, if the operator has given one. An answer that is
    read here must not be compressed."""
    left_out = HOP_BY_HOP | {b"host", b"expect"} | ({b"authorization"} if vllm.has_key else set())
    if request is not None:
        left_out |= {b"content-length"} | (set() if request.is_plain else {b"accept-encoding"})
    return [*(pair for pair in given if pair[0].lower() not in left_out), *vllm.headers]
