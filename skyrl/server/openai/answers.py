"""Turns the inference server's answers and events into the caller's: the caller's name for the model, and no field of
the server's own. Reads the token counts for usage.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import msgspec

from skyrl.server.sampling.completion import STOP_TOKEN, AbortedAnswer, MalformedAnswer
from skyrl.server.sampling.loaded_weights import NOT_TOLD, Span, check_began, spans_in

SHOWN = frozenset(
    {"choices", "created", "id", "object", "output_mode", "prompt_logprobs", "prompt_text", "prompt_token_ids"}
    | {"request_id", "service_tier", "system_fingerprint", "usage"}
)
"""Fields of an answer that go on to the caller, beside `model`."""
_TOKEN_ID = re.compile(rb'\{\s*"token_id"\s*:\s*(\d+)')
"""The beginning of a logprob in an answer to `generate`. No text in JSON has it: there a quote has a backslash."""
_FINISHED = frozenset({None, "function_call", "length", "stop", STOP_TOKEN, "tool_calls"})

_encode = msgspec.json.Encoder().encode


@dataclass(slots=True)
class Used:
    """Numbers of tokens. `cached_tokens` is the part of the prompts that came from the prefix cache."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    sampled_tokens: int = 0


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: _Details | None = None

    def used(self) -> Used:
        details = self.prompt_tokens_details
        cached = (details.cached_tokens or 0) if details is not None else 0
        return Used(self.prompt_tokens, min(cached, self.prompt_tokens), self.completion_tokens or 0)


class _Said(msgspec.Struct):
    tool_calls: list[msgspec.Raw] | None = None


class _Choice(msgspec.Struct):
    """`message` is a whole answer's, `delta` an event's."""

    index: int = 0
    finish_reason: str | None = None
    weight_versions: msgspec.Raw = NOT_TOLD
    message: _Said | None = None
    delta: _Said | None = None

    @property
    def calls(self) -> bool:
        """Whether it has a call of a tool, or a part of one."""
        return any(said is not None and bool(said.tool_calls) for said in (self.message, self.delta))


class _Seen(msgspec.Struct):
    """What the server reads of an answer or an event."""

    choices: list[_Choice]
    usage: _Usage | None = None


_CALLED = "tool_calls"
_choices = msgspec.json.Decoder(list[dict[str, Any]]).decode
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_seen = msgspec.json.Decoder(_Seen).decode


def _read(content: bytes) -> tuple[dict[str, Any], _Seen]:
    """The shown fields, undecoded, and what the server reads. Raises MalformedAnswer and AbortedAnswer."""
    try:
        fields, seen = _fields(content), _seen(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedAnswer(f"not a completion: {error}") from error
    for choice in seen.choices:
        if choice.finish_reason not in _FINISHED:
            raise AbortedAnswer(f"finish_reason {choice.finish_reason!r}")
    return {name: value for name, value in fields.items() if name in SHOWN}, seen


def with_token_names(content: bytes) -> bytes:
    """An answer to `generate` or an event of it, whose logprobs also have the name of their token, `token_id:7`. vLLM
    has told the id alone since 0.32; the package `renderers` (0.1.12), which verifiers uses, reads the name."""
    return _TOKEN_ID.sub(rb'{"token":"token_id:\1","token_id":\1', content)


def _tell_stops(fields: dict[str, Any], seen: _Seen, called: Collection[int]) -> None:
    """Change the finish reasons of choices that have stopped, and say something else: a word that OpenAI's clients do
    not know; or a call, which vLLM says of each answer that had to call a tool, also where it ended within its
    thoughts. `called` are the indices of choices that had a call earlier."""
    stopped = [
        choice.finish_reason == STOP_TOKEN
        or (choice.finish_reason == _CALLED and not choice.calls and choice.index not in called)
        for choice in seen.choices
    ]
    if any(stopped):
        fields["choices"] = [
            choice | {"finish_reason": "stop"} if has_stopped else choice
            for choice, has_stopped in zip(_choices(fields["choices"]), stopped, strict=True)
        ]


def rewritten(content: bytes, model: str, version: str | None = None) -> tuple[bytes, Used]:
    """A whole answer for the caller, and what it used. Raises MalformedAnswer, AbortedAnswer, and OtherWeights if it
    did not begin with the weights `version`."""
    fields, seen = _read(content)
    if version is not None:
        check_began((spans_in(choice.weight_versions) for choice in seen.choices), version)
    _tell_stops(fields, seen, ())
    return _encode(fields | {"model": model}), (seen.usage or _Usage()).used()


def versions_in(event: bytes) -> list[list[Span] | None]:
    """What an event of a stream tells of the weights that have begun its choices. Raises MalformedAnswer,
    AbortedAnswer."""
    return [spans_in(choice.weight_versions) for choice in _read(event)[1].choices]


class EventRewriter:
    """Rewrites the events of one stream. Every event of the server has the usage of its choice so far, and the last
    one has the whole usage. The caller gets the usage only where it asked for it."""

    def __init__(self, model: str, n: int, *, include_usage: bool, continuous_usage: bool) -> None:
        self._model = model
        self._n = n
        self._include_usage = include_usage
        self._continuous_usage = continuous_usage
        self._prompts: dict[int, int] = {}
        self._choices: dict[int, int] = {}
        self._total: Used | None = None
        self._called: set[int] = set()
        """The choices that have called a tool."""

    @property
    def used(self) -> Used:
        """What the stream has used so far. Cached tokens are known at its end."""
        return self._total or Used(sum(self._prompts.values()), 0, sum(self._choices.values()))

    def rewrite(self, event: bytes) -> bytes | None:
        """The event for the caller, None if the caller did not ask for it. Raises MalformedAnswer, AbortedAnswer."""
        fields, seen = _read(event)
        if not seen.choices:
            if seen.usage is not None:
                self._total = seen.usage.used()
            return _encode(fields | {"model": self._model}) if self._include_usage else None
        self._called.update(choice.index for choice in seen.choices if choice.calls)
        _tell_stops(fields, seen, self._called)
        if seen.usage is not None:
            for choice in seen.choices:
                self._prompts[choice.index // self._n] = seen.usage.prompt_tokens
                self._choices[choice.index] = seen.usage.completion_tokens or 0
            if not self._continuous_usage:
                del fields["usage"]
        return _encode(fields | {"model": self._model})
