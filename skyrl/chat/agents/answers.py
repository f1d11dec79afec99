"""Reads the tokens of an answer out of a chat completion, and makes the answer that the agent gets.

A session asks the inference server for logprobs and token ids with each answer. An agent that did not ask for them does
not get them.
"""

from __future__ import annotations

import base64
import binascii
import io
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from skyrl.base.types.agents import VersionSpan
from skyrl.sampling.completion import AnswerUsage, MalformedAnswer
from skyrl.sampling.servers import NOT_TOLD, spans_in

ASKED = {"logprobs": True, "return_tokens_as_token_ids": True, "include_reasoning": True}
"""Fields of each request to the inference server. With the second one each token in the logprobs is `token_id:N`."""
_TOKEN = "token_id:"


class _Logprob(msgspec.Struct):
    token: str
    logprob: float | None = None
    bytes: list[int] | None = None
    top_logprobs: list[_Logprob] = []
    constrained: bool | None = None
    """Whether a grammar has narrowed the token's choice; None: the inference server does not tell."""

    def shown(self) -> dict[str, Any]:
        """As a client reads it, which knows tokens by their texts."""
        text = bytes(self.bytes or ()).decode(errors="replace")
        top = [each.shown() for each in self.top_logprobs]
        shown = {"token": text, "logprob": self.logprob, "bytes": self.bytes, "top_logprobs": top}
        return shown | {"constrained": True} if self.constrained else shown


class _Logprobs(msgspec.Struct):
    content: list[_Logprob] | None = None


class _Choice(msgspec.Struct):
    index: int = 0
    message: dict[str, Any] | None = None
    delta: dict[str, Any] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    weight_versions: msgspec.Raw = NOT_TOLD
    routed_experts: str | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice]
    prompt_token_ids: list[int] | None = None
    usage: AnswerUsage | None = None


@dataclass(frozen=True, slots=True)
class Shown:
    """What the agent asked to see of the tokens."""

    logprobs: bool = False
    token_ids: bool = False
    reasoning: bool = True


@dataclass(slots=True)
class Sampled:
    """One choice as it comes in. `message` is the assistant's message as the agent gets it."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    marks: list[bool | None] = field(default_factory=list)
    """For each token whether a grammar has narrowed its choice; None: the inference server does not tell."""
    message: dict[str, Any] = field(default_factory=dict)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    versions: tuple[VersionSpan, ...] = ()
    routed_experts: str | None = None

    @property
    def ended(self) -> str:
        """The finish reason. Raises MalformedAnswer if the inference server has told none."""
        if self.finish_reason is None:
            raise MalformedAnswer("a choice has no finish reason")
        return self.finish_reason

    @property
    def tells_constrained(self) -> bool:
        """Whether the inference server has told of each token if it is constrained. Then its logprob is the model's
        own."""
        return None not in self.marks

    @property
    def constrained(self) -> NDArray[np.bool_] | None:
        """Bool [tokens]; None if no token is constrained, as far as the inference server tells."""
        return np.array([mark is True for mark in self.marks]) if True in self.marks else None

    @property
    def experts(self) -> bytes | None:
        """The rows of the experts, as NumPy's file. Raises MalformedAnswer."""
        if self.routed_experts is None:
            return None
        try:
            file = base64.b64decode(self.routed_experts, validate=True)
            rows = np.load(io.BytesIO(file), allow_pickle=False)
        except (binascii.Error, ValueError, EOFError, OSError) as error:
            raise MalformedAnswer(f"routed_experts cannot be read: {error}") from error
        if not isinstance(rows, np.ndarray) or rows.ndim != 3 or rows.dtype.kind not in "iu":
            raise MalformedAnswer("routed_experts are no rows of experts")
        return file

    @property
    def arrays(self) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Token ids and logprobs, both of shape [tokens]."""
        return np.array(self.ids, np.int32), np.array(self.logprobs, np.float32)


class Answers:
    """The answer to one request, with `n` choices."""

    def __init__(self, n: int, shown: Shown) -> None:
        self.choices = [Sampled() for _ in range(n)]
        self.prompt: list[int] | None = None
        """The prompt's tokens, if the inference server has told them."""
        self._shown = shown
        self._usage: AnswerUsage | None = None

    @property
    def usage(self) -> dict[str, int]:
        """Numbers of tokens: `prompt`, `cached`, `sampled`, of all choices together."""
        used = (self._usage or AnswerUsage()).used()
        sampled = sum(len(choice.ids) for choice in self.choices)
        return {"prompt": used.prompt_tokens, "cached": used.cached_tokens, "sampled": sampled}

    def whole(self, answer: bytes, model: str) -> bytes:
        """Read a whole answer. Returns what the agent gets. Raises MalformedAnswer."""
        fields, read = _decode(answer)
        for raw, choice in zip(fields["choices"], read.choices, strict=True):
            self._read(choice, raw)
            mine = self.choices[choice.index]
            mine.message = self._given(choice.message or {})
            raw["message"] = mine.message
        self._read_rest(read)
        return self._encoded(fields, model)

    def chunk(self, chunk: bytes, model: str) -> tuple[bytes, bool]:
        """Read a chunk of a streamed answer. Returns what the agent gets, and whether a choice ends with it. Raises
        MalformedAnswer."""
        fields, read = _decode(chunk)
        ends = False
        for raw, choice in zip(fields["choices"], read.choices, strict=True):
            self._read(choice, raw)
            delta = self._given(choice.delta or {})
            _add(self.choices[choice.index].message, delta)
            raw["delta"] = delta
            ends = ends or choice.finish_reason is not None
        self._read_rest(read)
        return self._encoded(fields, model), ends

    def check(self, given: int | None) -> None:
        """Raises MalformedAnswer unless each sampled token came with its logprob, and the prompt had the `given` number
        of tokens (None: the inference server made it)."""
        usage = self._usage
        if usage is None:
            raise MalformedAnswer("the answer has no usage")
        if (usage.completion_tokens or 0) != sum(len(choice.ids) for choice in self.choices):
            raise MalformedAnswer(f"{usage.completion_tokens} tokens were sampled, and not all came with a logprob")
        expected = len(self.prompt or ()) if given is None else given
        if usage.prompt_tokens != expected:
            raise MalformedAnswer(f"the prompt had {usage.prompt_tokens} tokens, not the {expected} that were given")

    def _read(self, choice: _Choice, raw: dict[str, Any]) -> None:
        """Add what a choice has to its tokens, and take out of it what the agent does not get."""
        if not 0 <= choice.index < len(self.choices):
            raise MalformedAnswer(f"choice {choice.index} was not asked for")
        mine = self.choices[choice.index]
        for token in (choice.logprobs.content or ()) if choice.logprobs is not None else ():
            if not token.token.startswith(_TOKEN) or token.logprob is None:
                raise MalformedAnswer("a sampled token came without its id or its logprob")
            mine.ids.append(int(token.token[len(_TOKEN) :]))
            mine.logprobs.append(token.logprob)
            mine.marks.append(token.constrained)
        if choice.finish_reason is not None:
            mine.finish_reason, mine.stop_reason = choice.finish_reason, choice.stop_reason
        if spans := spans_in(choice.weight_versions):
            mine.versions = tuple(VersionSpan(span.start, span.version) for span in spans)
        if choice.routed_experts is not None:
            mine.routed_experts = choice.routed_experts
        content = None if choice.logprobs is None else choice.logprobs.content
        asked = self._shown.logprobs and content is not None
        raw["logprobs"] = {"content": [token.shown() for token in content or ()]} if asked else None
        if not self._shown.token_ids:
            raw.pop("token_ids", None)
        raw.pop("routed_experts", None)

    def _read_rest(self, read: _Answer) -> None:
        if read.prompt_token_ids is not None:
            self.prompt = read.prompt_token_ids
        if read.usage is not None:
            self._usage = read.usage

    def _given(self, message: dict[str, Any]) -> dict[str, Any]:
        """A message or delta as the agent gets it."""
        left_out = () if self._shown.reasoning else ("reasoning",)
        return {key: value for key, value in message.items() if key not in left_out}

    def _encoded(self, fields: dict[str, Any], model: str) -> bytes:
        if not self._shown.token_ids:
            fields.pop("prompt_token_ids", None)
        return msgspec.json.encode(fields | {"model": model})


_any, _typed = msgspec.json.Decoder(dict[str, Any]).decode, msgspec.json.Decoder(_Answer).decode


def _decode(content: bytes) -> tuple[dict[str, Any], _Answer]:
    try:
        return _any(content), _typed(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedAnswer(f"not a chat completion: {error}") from error


def _add(message: dict[str, Any], delta: dict[str, Any]) -> None:
    """Add a delta to the message that it is a part of."""
    for key in ("content", "reasoning"):
        if delta.get(key) is not None:
            message[key] = (message.get(key) or "") + delta[key]
    if delta.get("role"):
        message["role"] = delta["role"]
    for call in delta.get("tool_calls") or ():
        _add_call(message.setdefault("tool_calls", []), call)


def _add_call(calls: list[dict[str, Any]], part: dict[str, Any]) -> None:
    index = part.get("index", 0)
    while len(calls) <= index:
        calls.append({"id": "", "type": "function", "function": {"name": "", "arguments": ""}})
    call, function = calls[index], part.get("function") or {}
    call["id"] = part.get("id") or call["id"]
    call["function"]["name"] += function.get("name") or ""
    call["function"]["arguments"] += function.get("arguments") or ""


def bare(message: dict[str, Any]) -> dict[str, Any]:
    """An assistant's message without its empty keys."""
    return {key: value for key, value in message.items() if value not in (None, [], "")} | {
        "role": "assistant",
        "content": message.get("content"),
    }
