"""Answers of a chat in the shape of OpenAI's Responses, whole or as a stream of events: reasoning, message, and calls.

The input of a custom tool goes out in one piece, when it is complete; until then comments keep the connection alive.
"""

from __future__ import annotations

import time
from typing import Any, Literal

import msgspec

from skyrl.base.wire.errors import RequestError
from skyrl.chat.dialects.dialect import Block, Blocks, ChatAnswer, Finish, Step, named_event, read_answer
from skyrl.chat.dialects.responses.conversation import OURS, ChatTools, custom_input
from skyrl.chat.openai.errors import TOO_LONG, OpenAIError
from skyrl.sampling.completion import AnswerUsage

Status = Literal["in_progress", "completed", "incomplete"]


class Items:
    """The items of one response. Their ids are made of the response's and their number."""

    def __init__(self, response_id: str, tools: ChatTools) -> None:
        self._suffix = response_id.removeprefix("resp_")
        self._tools = tools

    def is_custom(self, block: Block) -> bool:
        """Whether a block is a call of a custom tool."""
        return block.kind == "call" and self._tools.named(block.name).custom

    def id_of(self, block: Block) -> str:
        kind = {"thinking": "rs", "text": "msg", "call": "ctc" if self.is_custom(block) else "fc"}[block.kind]
        return f"{kind}_{self._suffix}_{block.number}"

    def item(self, block: Block, status: Status) -> dict[str, Any]:
        """The item of a block, empty while it is in progress."""
        begun = status != "in_progress"
        item: dict[str, Any] = {"id": self.id_of(block), "status": status}
        if block.kind == "text":
            content = [part(block, block.text)] if begun else []
            return item | {"type": "message", "role": "assistant", "content": content}
        if block.kind == "thinking":
            content = [part(block, block.text)] if begun else []
            kept = OURS + block.text if begun else None
            return item | {"type": "reasoning", "summary": [], "content": content, "encrypted_content": kept}
        named = self._tools.named(block.name)
        item |= {"call_id": block.call_id, "name": named.name}
        if named.namespace is not None:
            item["namespace"] = named.namespace
        if named.custom:
            return item | {"type": "custom_tool_call", "input": custom_input(block.text) if begun else ""}
        return item | {"type": "function_call", "arguments": arguments(block) if begun else ""}


def part(block: Block, text: str) -> dict[str, Any]:
    """The one part of a message or a reasoning."""
    if block.kind == "thinking":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def arguments(block: Block) -> str:
    """The arguments of a call, as the model wrote them; no text stands for no arguments."""
    return block.text or "{}"


ALIVE = b": a custom tool's input\n\n"
_encode = msgspec.json.Encoder().encode
_TEXT_EVENTS = {"thinking": "response.reasoning_text", "text": "response.output_text"}


class ResponsesEncoder:
    """`model` is the name that the client gave; the answer may tell another. `echo` are fields of the request that the
    response repeats."""

    def __init__(self, response_id: str, model: str, echo: dict[str, msgspec.Raw], tools: ChatTools) -> None:
        self._id = response_id
        self._model = model
        self._created_at = int(time.time())
        self._echo = echo
        self._items = Items(response_id, tools)
        self._blocks = Blocks()
        self._finish = Finish()
        self._output: list[dict[str, Any]] = []
        self._sent = 0

    def whole(self, answer: bytes) -> bytes:
        """Raises RequestError if the answer is no chat completion."""
        chat = read_answer(answer)
        self._read(chat)
        for choice in chat.choices:
            if choice.message is not None:
                steps = self._blocks.add(choice.message)
                self._output += (self._items.item(step.block, "completed") for step in steps if step.what == "end")
        self._output += (self._items.item(step.block, self._last_status) for step in self._blocks.end())
        return _encode(self._ended())

    def events(self, chunk: bytes) -> bytes:
        """Raises RequestError if the chunk is none of a chat completion."""
        chat = read_answer(chunk)
        self._read(chat)
        framed = [] if self._sent else [self._begin()]
        for choice in chat.choices:
            if choice.delta is not None:
                framed += (self._step(step, "completed") for step in self._blocks.add(choice.delta))
        return b"".join(framed)

    def end(self) -> bytes:
        framed = [self._step(step, self._last_status) for step in self._blocks.end()]
        response = self._ended()
        return b"".join([*framed, self._event(f"response.{response['status']}", response=response)])

    def failed(self, error: RequestError) -> bytes:
        """Also for a request that fails before its first chunk: some clients understand a code in a stream alone."""
        begun = b"" if self._sent else self._begin()
        response = self._response("failed") | {"error": {"code": _code(error), "message": error.message}}
        return begun + self._event("response.failed", response=response)

    def _read(self, chat: ChatAnswer) -> None:
        self._finish.read(chat)
        self._model = chat.model

    @property
    def _last_status(self) -> Status:
        return "incomplete" if self._finish.reason == "length" else "completed"

    def _begin(self) -> bytes:
        response = self._response("in_progress")
        created = self._event("response.created", response=response)
        return created + self._event("response.in_progress", response=response)

    def _ended(self) -> dict[str, Any]:
        response = self._response(self._last_status) | {"usage": _usage(self._finish.usage)}
        if self._last_status == "incomplete":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        return response

    def _response(self, status: str) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created_at,
            "model": self._model,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "output": self._output,
            "service_tier": "default",
            "usage": None,
            **self._echo,
        }

    def _event(self, kind: str, **content: Any) -> bytes:
        framed = named_event(kind, content | {"sequence_number": self._sent})
        self._sent += 1
        return framed

    def _step(self, step: Step, status: Status) -> bytes:
        """The framed events for a step; `status` is how an item ends."""
        if step.what == "begin":
            return self._begun(step.block)
        if step.what == "more":
            return self._more(step.block, step.more)
        return self._closed(step.block, status)

    def _begun(self, block: Block) -> bytes:
        item = self._items.item(block, "in_progress")
        added = self._event("response.output_item.added", output_index=block.number, item=item)
        if block.kind == "call":
            return added
        return added + self._of(block, "response.content_part.added", part=part(block, ""))

    def _more(self, block: Block, text: str) -> bytes:
        if self._items.is_custom(block):
            return ALIVE
        if block.kind == "call":
            return self._of(block, "response.function_call_arguments.delta", delta=text)
        return self._of(block, f"{_TEXT_EVENTS[block.kind]}.delta", delta=text)

    def _closed(self, block: Block, status: Status) -> bytes:
        item = self._items.item(block, status)
        self._output.append(item)
        if self._items.is_custom(block):
            kind, given = "response.custom_tool_call_input", item["input"]
            last = self._of(block, f"{kind}.delta", delta=given) + self._of(block, f"{kind}.done", input=given)
        elif block.kind == "call":
            kind, given = "response.function_call_arguments", arguments(block)
            unsaid = b"" if block.text else self._of(block, f"{kind}.delta", delta=given)
            last = unsaid + self._of(block, f"{kind}.done", arguments=given, name=item["name"])
        else:
            last = self._of(block, f"{_TEXT_EVENTS[block.kind]}.done", text=block.text)
            last += self._of(block, "response.content_part.done", part=part(block, block.text))
        return last + self._event("response.output_item.done", output_index=block.number, item=item)

    def _of(self, block: Block, kind: str, **content: Any) -> bytes:
        """An event about a part of an item."""
        where: dict[str, Any] = {"item_id": self._items.id_of(block), "output_index": block.number}
        if block.kind != "call":
            where["content_index"] = 0
        if kind.startswith("response.output_text"):
            where["logprobs"] = []
        return self._event(kind, **where, **content)


def _usage(usage: AnswerUsage) -> dict[str, Any]:
    used = usage.used()
    return {
        "input_tokens": used.prompt_tokens,
        "input_tokens_details": {"cached_tokens": used.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": used.sampled_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
        "total_tokens": used.prompt_tokens + used.sampled_tokens,
    }


def _code(error: RequestError) -> str:
    """OpenAI's code. Agents compact at `context_length_exceeded` and try again at codes of the server."""
    if TOO_LONG in error.message:
        return "context_length_exceeded"
    if error.status >= 500:
        return "server_error"
    code = error.code if isinstance(error, OpenAIError) else None
    return code or ("rate_limit_exceeded" if error.status == 429 else "invalid_prompt")
