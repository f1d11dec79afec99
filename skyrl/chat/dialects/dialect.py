"""What a dialect does: it turns a request into a chat completion's (`TranslatedRequest`), and the answer back.

`AnswerEncoder` writes one answer in a dialect; `ChatEncoder` is that of OpenAI's chat completions, which go on as they
are. `ChatAnswer` is what the other dialects read of a chat completion, whole or in chunks. `Blocks` cuts it into
blocks: thinking, text, and calls of tools, one after the other. Other dialects send an answer as a list of such blocks,
of which one is open at a time. A chat completion has one text and one thinking, and a list of calls; in a stream their
pieces may come in any order. The blocks are in the order in which the stream had their beginnings, so a text after a
call becomes a block of its own. Joined, the blocks of a kind are what the chat completion has.

`chat` is always OpenAI's chat completions, as `skyrl.chat.openai` checks and forwards them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import msgspec

from skyrl.base.wire.errors import RequestError
from skyrl.chat.openai.errors import OpenAIError, error_body
from skyrl.chat.openai.exchanges import DONE, event_frame
from skyrl.sampling.completion import AnswerUsage


class AnswerEncoder(Protocol):
    """Writes one answer in a dialect. Lives as long as one request."""

    def whole(self, answer: bytes) -> bytes:
        """The body for a whole chat completion."""
        ...

    def events(self, chunk: bytes) -> bytes:
        """The framed events for one chunk of a streamed chat completion; empty if it gives none."""
        ...

    def end(self) -> bytes:
        """The framed events after the last chunk."""
        ...

    def failed(self, error: RequestError) -> bytes:
        """The framed events with which a stream ends that has failed after its first event."""
        ...


@dataclass(frozen=True, slots=True)
class TranslatedRequest:
    """A request as a chat completion: its fields, `model`, `messages` and `stream` among them. `left_out` says in a
    sentence each what of the request has no effect, such as a tool that this server cannot serve."""

    chat: dict[str, Any]
    encoder: AnswerEncoder
    left_out: tuple[str, ...] = field(default=())


class ChatEncoder:
    """Every answer and chunk goes on unchanged."""

    def whole(self, answer: bytes) -> bytes:
        return answer

    def events(self, chunk: bytes) -> bytes:
        return event_frame(chunk)

    def end(self) -> bytes:
        return event_frame(DONE)

    def failed(self, error: RequestError) -> bytes:
        code = error.code if isinstance(error, OpenAIError) else None
        return event_frame(msgspec.json.encode(error_body(error.status, error.message, error.field, code)))


_encode = msgspec.json.Encoder().encode


def named_event(name: str, content: dict[str, Any]) -> bytes:
    """The frame of an event, whose `type` in the content is its name."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), _encode({"type": name, **content}))


class Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class CallPiece(msgspec.Struct):
    """A call of a tool, or a piece of one. Whole answers have no `index`: there the place in the list counts."""

    function: Function | None = None
    index: int | None = None
    id: str | None = None


class AssistantDelta(msgspec.Struct):
    """The assistant's message, or what a chunk adds to it."""

    reasoning: str | None = None
    content: str | None = None
    tool_calls: list[CallPiece] | None = None


class Choice(msgspec.Struct):
    """`stop_reason` is vLLM's: the stop string that ended the answer, or a token id."""

    message: AssistantDelta | None = None
    delta: AssistantDelta | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class ChatAnswer(msgspec.Struct):
    """A chat completion or a chunk of one. A stream's last chunk has the usage and no choice."""

    id: str
    model: str
    choices: list[Choice]
    usage: AnswerUsage | None = None


class Finish(msgspec.Struct):
    """How an answer ended. Filled in from one chunk after the other."""

    reason: str | None = None
    stop_string: str | None = None
    usage: AnswerUsage = msgspec.field(default_factory=AnswerUsage)

    def read(self, answer: ChatAnswer) -> None:
        for choice in answer.choices:
            if choice.finish_reason is not None:
                self.reason = choice.finish_reason
                self.stop_string = choice.stop_reason if isinstance(choice.stop_reason, str) else None
        if answer.usage is not None:
            self.usage = answer.usage


_decode = msgspec.json.Decoder(ChatAnswer).decode


def read_answer(answer: bytes) -> ChatAnswer:
    """Raises RequestError (503) if the inference server's answer is no chat completion."""
    try:
        return _decode(answer)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise malformed(str(error)) from error


def malformed(reason: str) -> RequestError:
    return RequestError(f"the inference server's answer cannot be turned into this dialect: {reason}", status=503)


Kind = Literal["thinking", "text", "call"]


@dataclass(slots=True)
class Block:
    """`number` counts the blocks of an answer from 0. `call_id` and `name` are those of a call, whose `text` are its
    arguments."""

    kind: Kind
    number: int
    call_id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)


@dataclass(frozen=True, slots=True)
class Step:
    """A block begins, gets `more` text, or ends."""

    what: Literal["begin", "more", "end"]
    block: Block
    more: str = ""


class Blocks:
    """Follows one answer. White space alone makes no block of thinking or text: models put some between thinking and
    calls, and Anthropic's own server refuses such a block. It is kept back until a text follows it."""

    def __init__(self) -> None:
        self.all: list[Block] = []
        self._open: Block | None = None
        self._kept: dict[Kind, str] = {}
        self._calls: dict[int, Block] = {}

    def add(self, said: AssistantDelta) -> list[Step]:
        """Raises RequestError for a call without a name, and for a call that goes on after it has ended."""
        steps = self._write("thinking", said.reasoning or "") + self._write("text", said.content or "")
        for place, call in enumerate(said.tool_calls or ()):
            steps += self._call(call, place if call.index is None else call.index)
        return steps

    def end(self) -> list[Step]:
        """The steps after the last piece."""
        return self._close()

    def _write(self, kind: Kind, text: str) -> list[Step]:
        text = self._kept.pop(kind, "") + text
        if self._open is not None and self._open.kind == kind:
            return self._extend(self._open, text)
        if not text or text.isspace():
            self._kept[kind] = text
            return []
        steps = self._begin(Block(kind, len(self.all)))
        return steps + self._extend(self.all[-1], text)

    def _call(self, call: CallPiece, index: int) -> list[Step]:
        steps: list[Step] = []
        function = call.function or Function()
        block = self._calls.get(index)
        if block is None:
            if not function.name:
                raise malformed("a call of a tool begins without the tool's name")
            block = self._calls[index] = Block("call", len(self.all), _id_of(call), function.name)
            steps = self._begin(block)
        if more := function.arguments or "":
            if block is not self._open:
                raise malformed("a call of a tool goes on after another block has begun")
            steps += self._extend(block, more)
        return steps

    def _begin(self, block: Block) -> list[Step]:
        steps = self._close()
        self.all.append(block)
        self._open = block
        return [*steps, Step("begin", block)]

    def _extend(self, block: Block, text: str) -> list[Step]:
        if not text:
            return []
        block.pieces.append(text)
        return [Step("more", block, text)]

    def _close(self) -> list[Step]:
        block, self._open = self._open, None
        return [] if block is None else [Step("end", block)]


def _id_of(call: CallPiece) -> str:
    """Clients name the id in the result of the call, so one is made where the inference server gives none."""
    return call.id or f"call_{os.urandom(12).hex()}"
