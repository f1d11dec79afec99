"""Requests that are not the sidecar's own go to vLLM as they are, and vLLM's answers to the client, in both directions
as they come. Bodies of requests that sample are read before: `openai_request` says which fields must not pass.

`OpenaiAnswers` adds to vLLM's answers to completions and chats what SGLang's clients ask for: `meta_info` in each
choice. It checks that vLLM has sampled after the prompt that the client gave."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import AsyncIterable
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import msgspec

from skyrl.http.client import AnswerStream
from skyrl.http.connection import HeaderList, Interrupted
from skyrl.http.forward import RequestHead, pass_back, passed_on
from skyrl.http.messages import Body, Reply, encoded
from skyrl.inference.sidecar.call import Call
from skyrl.inference.sidecar.completion import Collected, finish_reason, meta_info
from skyrl.inference.sidecar.errors import BadRequest, VllmBroke, VllmInterrupted
from skyrl.inference.sidecar.facts import KnownFacts, WeightVersion
from skyrl.inference.sidecar.generate_request import Logprobs
from skyrl.inference.sidecar.in_flight import InFlight
from skyrl.inference.sidecar.openai_request import INVOCATIONS, OF_VLLM, OpenaiRequest, read_openai
from skyrl.inference.sidecar.vllm import Vllm

MAX_FIRST_EVENT = 8 * 2**20
"""Bytes of a stream before the event that tells its prompt."""
TOOL_CALLS = "tool_calls"
_THEIR_NAMES = (b"`kv_transfer_params['prompt_token_ids']`", b"kv_transfer_params.prompt_token_ids")


@dataclass(eq=False)
class OpenaiAnswers:
    facts: KnownFacts
    version: WeightVersion

    async def check_length(self, request: OpenaiRequest) -> None:
        """Raises BadRequest, with SGLang's words, for a prompt of ids that leaves no room; other SidecarErrors."""
        if request.given_tokens and request.given_tokens >= (context := (await self.facts.get()).context):
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
        return encoded(answer)

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
        version = await self.version.at_end(collected.versions)
        logprobs = Logprobs() if request.logprobs else None
        start = request.routed_experts_start
        return meta_info(name, finish, prompt, collected, version, started, logprobs=logprobs, experts_start=start)


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
        request = read_openai(call.path, await call.whole_body())
        await answers.check_length(request)
    head = RequestHead.of(_request_headers(call.scope["headers"], vllm, request))
    if samples and request is None and not in_flight.opened.is_set():
        await call.whole_body()  # only then a client that leaves is seen
    body = call.body if call.body.complete else Body(call.receive, math.inf)
    body.complete = body.complete or not head.has_body
    async with body.while_connected(), in_flight.passing() if samples else contextlib.nullcontext():
        content, length = body.pieces(), head.length
        if body.complete:
            content = body.begun if request is None else request.body
            length = len(content) if head.has_body or content else None
        raw_path: bytes = call.scope.get("raw_path") or call.path.encode()
        target = b"%s?%s" % (raw_path, call.query) if call.query else raw_path
        started = time.monotonic()
        with closing(await vllm.open(call.method, target, head.lines, content, length)) as response:
            try:
                await _answer(call, response, request, vllm, answers, started)
            except Interrupted as error:
                raise VllmInterrupted(f"vLLM's answer broke: {error}") from error


async def _answer(
    call: Call,
    response: AnswerStream,
    request: OpenaiRequest | None,
    vllm: Vllm,
    answers: OpenaiAnswers,
    started: float,
) -> None:
    headers, begun = passed_on(response.status, response.headers), b""
    if request is not None and not request.is_plain:
        if response.status != 200 or not request.stream:
            whole = await vllm.read(response)
            if response.status == 200:
                whole = await answers.whole(request, whole, started)
            for name in _THEIR_NAMES if response.status != 200 else ():
                whole = whole.replace(name, b"input_ids")  # the field that the client has sent
            kept = [header for header in headers if header[0] != b"content-length"]
            await Reply(response.status, kept, whole).send(call.send)
            return
        assert request.tokens is not None  # all else is refused for streams
        begun = await checked(response, request.tokens)
    await pass_back(response, headers, call.send, begun)


def _request_headers(given: HeaderList, vllm: Vllm, request: OpenaiRequest | None) -> HeaderList:
    """A key of the client's is for this server; vLLM gets its own, if the operator has given one. An answer that is
    read here must not be compressed."""
    left_out = {b"authorization"} if vllm.has_key else set()
    if request is not None and not request.is_plain:
        left_out.add(b"accept-encoding")
    return [*(pair for pair in given if pair[0] not in left_out), *vllm.headers]
