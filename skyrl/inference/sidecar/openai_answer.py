"""vLLM's answers to completions and chats, with what SGLang's clients ask for: `meta_info` in each choice.

Checks that vLLM has sampled after the prompt that the client gave. Knows nothing of HTTP.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import msgspec

from skyrl.inference.sidecar.call import compact
from skyrl.inference.sidecar.completion import Collected
from skyrl.inference.sidecar.errors import BadRequest, VllmBroke
from skyrl.inference.sidecar.facts import KnownFacts, WeightVersion
from skyrl.inference.sidecar.generate_request import Logprobs
from skyrl.inference.sidecar.meta_info import basics, finish_reason, logprob_lists
from skyrl.inference.sidecar.openai_request import OpenaiRequest
from skyrl.inference.sidecar.routed_experts import routed_experts

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


async def checked(chunks: AsyncIterator[bytes], tokens: list[int]) -> bytes:
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
