"""What turns need of each base model, loaded from its files: tokenizer, renderer, habits, and how turns are continued.

`renderer_of` chooses the renderer as vLLM does. `Habits` are what a renderer does with the earlier turns of a
conversation, tried on short ones when the model is loaded: many templates drop the thoughts of earlier answers, and
some have a switch that keeps them. A session of a model gets the switches with which its turns can be continued.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from skyrl.base.model_files import file_of, json_of, template_of, whole_config
from skyrl.base.model_tokenizer import tokenizer_of
from skyrl.chat.agents.rendering import vllm_renderers
from skyrl.chat.agents.rendering.continuation import ContinuationTokenizer, Continued, Fork, Kept, Step
from skyrl.chat.agents.rendering.renderer import CannotRender, ChatTemplate, Renderer, Setting, tools_of
from skyrl.inference.parsers import RENDERED_BY_VLLM, parsers_of

_CHARACTER_TOKENS = 4
"""The most tokens that one character has: those of its bytes in UTF-8."""
_VARIABLES = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")


class FileTokens:
    """A TextTokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def id_of(self, text: str) -> int | None:
        return self._tokenizer.token_to_id(text)

    def text_of(self, token: int) -> str | None:
        return self._tokenizer.id_to_token(token)

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


def stops_of(base_model: str, tokens: FileTokens) -> dict[str, int]:
    """The tokens that end an answer, as the model's files name them, by their texts."""
    found: set[int] = set()
    for file in ("generation_config.json", "config.json"):
        given = json_of(base_model, file).get("eos_token_id")
        found.update([given] if isinstance(given, int) else given or [])
    text = special_tokens(json_of(base_model, "tokenizer_config.json")).get("eos_token")
    if text is not None and (token := tokens.id_of(text)) is not None:
        found.add(token)
    return {text: token for token in sorted(found) if (text := tokens.text_of(token)) is not None}


def special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens in tokenizer_config.json, by their names."""
    found = {name: settings.get(name) for name in _VARIABLES}
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in found.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


_MISTRAL = "tekken.json"
"""The file of mistral-common's tokenizers, with which vLLM renders chats by that library."""


def renderer_of(base_model: str) -> Renderer | None:
    """The renderer of a model: a directory, or a name of the model hub. None if it has no template on this machine, or
    if vLLM renders its chats with code that this process does not have. Raises CannotRender."""
    kind = whole_config(base_model).get("model_type", "")
    if kind in vllm_renderers.HARMONY_KINDS:
        return vllm_renderers.Harmony()
    if kind in vllm_renderers.DEEPSEEK_KINDS:
        return vllm_renderers.DeepSeek(kind)
    if kind in vllm_renderers.INKLING_KINDS:
        return vllm_renderers.Inkling()
    if kind in RENDERED_BY_VLLM or ((own := file_of(base_model, _MISTRAL)) is not None and own.is_file()):
        return None
    text, with_tools = template_of(base_model, tools=False), template_of(base_model, tools=True)
    settings = json_of(base_model, "tokenizer_config.json")
    text = with_tools if text is None else text
    return None if text is None else ChatTemplate(text, special_tokens(settings), with_tools)


def has_system_role(base_model: str) -> bool:
    """Whether the chats of a model take system messages; True if its template cannot be read on this machine."""
    try:
        renderer = renderer_of(base_model)
    except CannotRender:
        return True
    return renderer is None or renderer.has_system_role


SWITCHES: dict[str, bool] = {
    "preserve_thinking": True,
    "clear_thinking": False,
    "truncate_history_thinking": False,
    "drop_thinking": False,
    "enable_thinking": True,
}
"""Arguments of templates that keep the thoughts of earlier answers, each with the value that does."""
_TURNS = 3
_NO_THOUGHTS = re.compile(r"(</(?:\w+:)?think>|\[/THINK\]|<\|END_THINKING\|>)\s*$")
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Looks at a place.",
            "parameters": {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]},
        },
    }
]


@dataclass(frozen=True, slots=True)
class Habits:
    """`switches` are arguments of the template that sessions set. `user_turns` and `tool_loops` say why an earlier turn
    cannot be continued when the user speaks again, and when results of tools follow; None if it can."""

    switches: dict[str, bool] = field(default_factory=dict)
    user_turns: str | None = None
    tool_loops: str | None = None

    @property
    def description(self) -> dict[str, Any]:
        """As clients see it."""
        return {
            "chat_template_kwargs": self.switches,
            "user_turns": self.user_turns or "exact",
            "tool_loops": self.tool_loops or "exact",
        }


def habits_of(model: ContinuationTokenizer, *, thinks: bool) -> Habits:
    """`thinks` says whether the inference server reads thoughts out of the model's answers."""
    known = {name: value for name, value in SWITCHES.items() if name in model.renderer.variables}
    tried: list[dict[str, bool]] = [{}, *({name: value} for name, value in known.items())]
    if len(known) > 1:
        tried.append(known)
    found = (_habits(model, switches, thinks) for switches in tried)
    return max(found, key=lambda habits: (habits.user_turns is None, habits.tool_loops is None))


def _habits(model: ContinuationTokenizer, switches: dict[str, bool], thinks: bool) -> Habits:
    def why(steps: Iterator[Step]) -> str | None:
        return next((fork.note for step in steps if (fork := _fork(model, step)) is not None), None)

    try:
        begun = model.renderer.render([{"role": "user", "content": "Go."}], Setting(switches))
    except CannotRender as error:
        return Habits(switches, str(error), str(error))
    thoughtful = thinks and _NO_THOUGHTS.search(begun) is None
    return Habits(
        switches,
        why(_steps(model, Setting(switches), calls=False, thinks=thoughtful)),
        why(_steps(model, Setting(switches, tools_of(_TOOLS)), calls=True, thinks=thoughtful)),
    )


def _fork(model: ContinuationTokenizer, step: Step) -> Fork | None:
    """Why a turn cannot be continued, whichever token has ended it."""
    forks: list[Fork] = []
    for token in model.stops.values():
        done = model.continued(replace(step, sampled=np.array([token], np.int32)))
        if not isinstance(done, Fork):
            return None
        forks.append(done)
    return forks[0]


def _steps(model: ContinuationTokenizer, setting: Setting, *, calls: bool, thinks: bool) -> Iterator[Step]:
    system = [{"role": "system", "content": "You help."}] if model.renderer.has_system_role else []
    messages: list[dict[str, Any]] = [*system, {"role": "user", "content": "How many boats?"}]
    for turn in range(_TURNS):
        answer = _answer(turn, calls, thinks)
        asked = {"role": "user", "content": f"And on day {turn + 2}?"}
        new = [{"role": "tool", "tool_call_id": _id(turn), "content": f"{turn + 3} boats"} if calls else asked]
        yield Step(
            id="",
            next_id="",
            before=messages,
            said=[True] * turn,
            answer=answer,
            new=new,
            prompt=np.array([], np.int32),
            sampled=np.array([], np.int32),
            setting=setting,
            keep=False,
        )
        messages = [*messages, answer, *new]


def _answer(turn: int, calls: bool, thinks: bool) -> dict[str, Any]:
    answer: dict[str, Any] = {"role": "assistant", "content": "" if calls else f"{turn + 3} boats."}
    if calls:
        function = {"name": "look", "arguments": json.dumps({"at": f"pier {turn}"})}
        answer["tool_calls"] = [{"id": _id(turn), "type": "function", "function": function}]
    return answer | {"reasoning": f"I count {turn + 3}."} if thinks else answer


def _id(turn: int) -> str:
    """Of the nine characters that Mistral's templates want."""
    return f"call{turn:05}"


logger = logging.getLogger(__name__)

LARGE_MESSAGES, LARGE_CHARACTERS = 40, 20_000
"""A longer conversation, or more new text, is rendered and tokenised in a thread: a message takes some 0.05 ms, and a
thousand characters 0.1 ms."""


@dataclass(frozen=True)
class Loaded:
    """Of one base model; what its files do not give is None. `why` says why its turns cannot be continued."""

    tokens: FileTokens | None = None
    continuations: ContinuationTokenizer | None = None
    habits: Habits = Habits()
    why: str = ""


class ModelContinuations:
    """`base_models` are directories, or names of the model hub, by the base models' numbers."""

    def __init__(self, base_models: Sequence[str]) -> None:
        self._base_models = base_models
        self._loaded: dict[int, Loaded] = {}
        self._lock = asyncio.Lock()

    async def continued(self, number: int, step: Step, kept: Kept) -> Continued | Fork:
        """The token ids that continue a turn, or why there are none."""
        loaded = await self._of(number)
        if loaded.continuations is None:
            return Fork("not_extendable", loaded.why)
        new = sum(len(str(message.get("content") or "")) for message in step.new)
        if len(step.before) > LARGE_MESSAGES or new > LARGE_CHARACTERS:
            return await asyncio.to_thread(loaded.continuations.continued, step, kept)
        return loaded.continuations.continued(step, kept)

    async def habits(self, number: int) -> Habits:
        """What sessions of a base model can count on."""
        return (await self._of(number)).habits

    async def texts(self, number: int, ids: Sequence[int]) -> list[str] | None:
        """As `FileTokens.texts`; None if the files of the base model are not on this machine."""
        tokens = (await self._of(number)).tokens
        return None if tokens is None else await asyncio.to_thread(tokens.texts, ids)

    async def _of(self, number: int) -> Loaded:
        if number not in self._loaded:
            async with self._lock:
                if number not in self._loaded:
                    self._loaded[number] = await asyncio.to_thread(load, self._base_models[number])
        return self._loaded[number]


def load(base_model: str) -> Loaded:
    """From the files of a model: a directory, or a name of the model hub."""
    tokens: FileTokens | None = None
    try:
        tokenizer = tokenizer_of(base_model)
        if tokenizer is None:
            return _unloaded(base_model, None, "the model has no tokenizer on this machine")
        tokens = FileTokens(tokenizer)
        renderer = renderer_of(base_model)
    except CannotRender as error:
        return _unloaded(base_model, tokens, str(error))
    except ValueError as error:
        return _unloaded(base_model, None, f"the tokenizer cannot be read: {error}")
    if renderer is None:
        return _unloaded(base_model, tokens, "the model has no chat template that this process can render")
    if not (stops := stops_of(base_model, tokens)):
        return _unloaded(base_model, tokens, "the model's files name no token that ends an answer")
    continuations = ContinuationTokenizer(renderer, tokens, stops)
    return Loaded(tokens, continuations, habits_of(continuations, thinks=_thinks(base_model)))


def _unloaded(base_model: str, tokens: FileTokens | None, why: str) -> Loaded:
    logger.warning("each turn of an agent session of %s is rendered anew: %s", base_model, why)
    return Loaded(tokens, habits=Habits(user_turns=why, tool_loops=why), why=why)


def _thinks(base_model: str) -> bool:
    """Whether the inference server reads thoughts out of the model's answers."""
    return parsers_of(whole_config(base_model).get("model_type", ""), template_of(base_model) or "")[1] is not None
