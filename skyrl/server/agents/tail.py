"""The tokens that go between a turn's answer and the next one: the rendering of the messages that are new.

A template renders whole conversations. Here it renders a short one that ends with the new messages, and the part after
the answer's end is the tail. Two short conversations that begin differently must have the same tail; if not, or if the
template fails, there is none, and the whole conversation has to be rendered.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from skyrl.base.model_files import file_of, json_of
from skyrl.server.agents.template import CannotRender, ChatTemplate, prepared, read_template, special_tokens
from skyrl.server.openai import system_messages

logger = logging.getLogger(__name__)

_FIRST = ("go", "Tell me more.")
"""The first messages of the two short conversations."""
_TOOLS = [
    {"type": "function", "function": {"name": name, "description": name, "parameters": {"type": "object"}}}
    for name in ("look", "ask")
]
"""They stand in the place of the agent's tools, one in each short conversation: a template may write tools anew beside
the newest message, and then the earlier turn cannot be continued."""
MAX_CHECKED = 1000
_CHARACTER_TOKENS = 4
"""The most tokens that one character has: those of its bytes in UTF-8."""


class Tails:
    """Of one model. `stops` are the tokens that end an answer."""

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer, stops: frozenset[int]) -> None:
        self._template = template
        self._tokenizer = tokenizer
        self._stops = stops
        self._stop_texts = {text: token for token in stops if (text := tokenizer.id_to_token(token)) is not None}
        self._words = [f"x{secrets.token_hex(8)}x" for _ in _FIRST]
        """They stand in the place of an answer and of the arguments of its tool calls. No client can know them."""
        self._checked: set[tuple[Any, ...]] = set()
        self._told: set[str] = set()

    @classmethod
    def load(cls, base_model: str) -> Tails | None:
        """From the files of a model: a directory, or a name of the model hub. None if it has no template, no tokenizer
        or no token that ends an answer on this machine."""
        try:
            template = read_template(base_model)
            file = file_of(base_model, "tokenizer.json")
            if template is None or file is None:
                return None
            tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # tokenizers raises bare exceptions
            logger.warning("the template or the tokenizer of %s cannot be read: %s", base_model, error)
            return None
        stops = _stops(base_model, tokenizer)
        return cls(template, tokenizer, stops) if stops else None

    def tail(
        self,
        answer: Mapping[str, Any],
        new: Sequence[dict[str, Any]],
        sampled: NDArray[np.int32],
        arguments: Mapping[str, Any],
        tools: bool = False,
    ) -> list[int] | None:
        """The token ids after `sampled`, the tokens of `answer`, with which the conversation goes on with the `new`
        messages and the beginning of another answer. `arguments` are those of the template, `tools` says whether the
        agent has any. None if there are none."""
        try:
            text = self._text(answer, new, arguments, tools)
        except CannotRender as error:
            self._tell(str(error))
            return None
        found = [(at, stop) for stop in self._stop_texts if (at := text.find(stop)) >= 0]
        if not found:
            self._tell("no token that ends an answer follows an answer")
            return None
        at, stop = min(found)
        ids = self._tokenizer.encode(text[at:], add_special_tokens=False).ids
        if not ids or ids[0] != self._stop_texts[stop]:
            self._tell(f"{stop!r} is not one token")
            return None
        ended = len(sampled) > 0 and int(sampled[-1]) in self._stops
        return ids[1:] if ended else ids

    def texts(self, ids: Sequence[int]) -> list[str]:
        """The text of each token, special ones too. A character that consists of several tokens is the text of the
        last one, and the others are empty. What is no text is U+FFFD."""
        texts: list[str] = []
        stream, waiting = DecodeStream(skip_special_tokens=False), 0
        for token in ids:
            text = stream.step(self._tokenizer, token)
            waiting = 0 if text else waiting + 1
            if waiting == _CHARACTER_TOKENS:  # the stream would wait for its end, and decode all of it at each step
                stream, waiting, text = DecodeStream(skip_special_tokens=False), 0, "\ufffd"
            texts.append(text or "")
        return texts

    def _text(
        self, answer: Mapping[str, Any], new: Sequence[dict[str, Any]], arguments: Mapping[str, Any], tools: bool
    ) -> str:
        """What follows the answer, from within its last part on. Raises CannotRender."""
        messages = [prepared(message) for message in system_messages.for_template(new, begins=False)]
        given = (arguments, tools)
        text = self._rendered(0, answer, messages, *given)
        form = (
            tuple(message["role"] for message in messages),
            len(answer.get("tool_calls") or ()),
            repr(arguments),
            tools,
        )
        if form not in self._checked:
            if self._rendered(1, answer, messages, *given) != text:
                raise CannotRender("what follows an answer depends on what was before it")
            tried = self._rendered(0, answer, [m | {"content": self._words[1]} for m in messages], *given)
            if tried.count(self._words[1]) < len(messages):  # it may read lists of parts alone
                raise CannotRender("the template leaves a message out")
            if not self._ends(tried):
                raise CannotRender("no token that ends an answer follows an answer")
            if len(self._checked) >= MAX_CHECKED:
                self._checked.clear()
            self._checked.add(form)
        return text

    def _ends(self, text: str) -> bool:
        """Whether the answer ends before the new messages, which have a word of their own as their content. A client
        could write a token that ends an answer into a message."""
        return any(stop in text.partition(self._words[1])[0] for stop in self._stop_texts)

    def _rendered(
        self,
        probe: int,
        answer: Mapping[str, Any],
        new: Sequence[dict[str, Any]],
        arguments: Mapping[str, Any],
        tools: bool,
    ) -> str:
        first, word = _FIRST[probe], self._words[probe]
        said: dict[str, Any] = {"role": "assistant", "content": word}
        if calls := answer.get("tool_calls"):
            said["tool_calls"] = [_with_arguments(call, {"a": word}) for call in calls]
        messages = [{"role": "user", "content": first}, said, *new]
        whole = self._template.render(messages, arguments, [_TOOLS[probe]] if tools else None)
        _, found, after = whole.rpartition(word)
        if not found:
            raise CannotRender("the template leaves an answer out")
        return after

    def _tell(self, why: str) -> None:
        if why not in self._told and len(self._told) < MAX_CHECKED:
            self._told.add(why)
            logger.info("turns of agent sessions are rendered anew: %s", why)


def _with_arguments(call: Mapping[str, Any], arguments: dict[str, Any]) -> dict[str, Any]:
    name = (call.get("function") or {}).get("name", "")
    return {"id": call.get("id", ""), "type": "function", "function": {"name": name, "arguments": arguments}}


def _stops(base_model: str, tokenizer: Tokenizer) -> frozenset[int]:
    """The tokens that end an answer, as the model's files name them."""
    found: set[int] = set()
    for file in ("generation_config.json", "config.json"):
        given = json_of(base_model, file).get("eos_token_id")
        found.update([given] if isinstance(given, int) else given or [])
    text = special_tokens(json_of(base_model, "tokenizer_config.json")).get("eos_token")
    if text is not None and (token := tokenizer.token_to_id(text)) is not None:
        found.add(token)
    return frozenset(found)
