"""How turns are continued, for each base model: with the renderer and the tokenizer in the base model's directory."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from skyrl.base.model_files import template_of, whole_config
from skyrl.base.model_tokenizer import tokenizer_of
from skyrl.inference.parsers import parsers_of
from skyrl.server.agents.rendering.continuation import Continuations, Continued, Fork, Kept, Step
from skyrl.server.agents.rendering.habits import Habits, habits_of
from skyrl.server.agents.rendering.renderer import CannotRender
from skyrl.server.agents.rendering.renderers import renderer_of
from skyrl.server.agents.rendering.tokens import FileTokens, stops_of

logger = logging.getLogger(__name__)

LARGE_MESSAGES, LARGE_CHARACTERS = 40, 20_000
"""A longer conversation, or more new text, is rendered and tokenised in a thread: a message takes some 0.05 ms, and a
thousand characters 0.1 ms."""


@dataclass(frozen=True)
class Loaded:
    """Of one base model; what its files do not give is None. `why` says why its turns cannot be continued."""

    tokens: FileTokens | None = None
    continuations: Continuations | None = None
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
    continuations = Continuations(renderer, tokens, stops)
    return Loaded(tokens, continuations, habits_of(continuations, thinks=_thinks(base_model)))


def _unloaded(base_model: str, tokens: FileTokens | None, why: str) -> Loaded:
    logger.warning("each turn of an agent session of %s is rendered anew: %s", base_model, why)
    return Loaded(tokens, habits=Habits(user_turns=why, tool_loops=why), why=why)


def _thinks(base_model: str) -> bool:
    """Whether the inference server reads thoughts out of the model's answers."""
    return parsers_of(whole_config(base_model).get("model_type", ""), template_of(base_model) or "")[1] is not None
