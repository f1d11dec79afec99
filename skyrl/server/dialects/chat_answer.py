"""What the dialects read of a chat completion, whole or in chunks."""

from __future__ import annotations

import msgspec

from skyrl.base.wire.errors import RequestError


class Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class Call(msgspec.Struct):
    """A call of a tool, or a piece of one. Whole answers have no `index`: there the place in the list counts."""

    function: Function | None = None
    index: int | None = None
    id: str | None = None


class Said(msgspec.Struct):
    """The assistant's message, or what a chunk adds to it."""

    reasoning: str | None = None
    content: str | None = None
    tool_calls: list[Call] | None = None


class Choice(msgspec.Struct):
    """`stop_reason` is vLLM's: the stop string that ended the answer, or a token id."""

    message: Said | None = None
    delta: Said | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class SampledDetails(msgspec.Struct):
    reasoning_tokens: int | None = None


class Usage(msgspec.Struct):
    """Numbers of tokens."""

    prompt_tokens: int = 0
    completion_tokens: int | None = None
    prompt_tokens_details: PromptDetails | None = None
    completion_tokens_details: SampledDetails | None = None

    @property
    def sampled(self) -> int:
        return self.completion_tokens or 0

    @property
    def cached(self) -> int:
        """How many of the prompt's tokens came from the prefix cache."""
        details = self.prompt_tokens_details
        return 0 if details is None else min(details.cached_tokens or 0, self.prompt_tokens)

    @property
    def reasoning(self) -> int:
        details = self.completion_tokens_details
        return 0 if details is None else details.reasoning_tokens or 0


class ChatAnswer(msgspec.Struct):
    """A chat completion or a chunk of one. A stream's last chunk has the usage and no choice."""

    id: str
    model: str
    choices: list[Choice]
    usage: Usage | None = None


class Finish(msgspec.Struct):
    """How an answer ended. Filled in from one chunk after the other."""

    reason: str | None = None
    stop_string: str | None = None
    usage: Usage = msgspec.field(default_factory=Usage)

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
