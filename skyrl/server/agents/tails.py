"""The tails of turns, for each base model: made from the template and the tokenizer in the base model's directory."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from skyrl.base.types.agents import AgentTurn
from skyrl.server.agents.tail import Tails

logger = logging.getLogger(__name__)

LARGE_CHARACTERS = 20_000
"""Messages of more text are tokenised in a thread: a thousand characters take some 0.1 ms."""


class TailsOfModels:
    """`base_models` are directories, or names of the model hub, by the base models' numbers."""

    def __init__(self, base_models: Sequence[str]) -> None:
        self._base_models = base_models
        self._loaded: dict[int, Tails | None] = {}
        self._lock = asyncio.Lock()

    async def tail(
        self, number: int, turn: AgentTurn, new: list[dict[str, Any]], fields: Mapping[str, Any]
    ) -> list[int] | None:
        """The token ids that continue a turn with new messages; None if the base model's template has none for them, or
        its files are not on this machine."""
        tails = await self._tails(number)
        if tails is None:
            return None
        arguments = (turn.answer, new, turn.sampled, template_arguments(fields), bool(fields.get("tools")))
        if sum(len(str(message.get("content") or "")) for message in new) > LARGE_CHARACTERS:
            return await asyncio.to_thread(tails.tail, *arguments)
        return tails.tail(*arguments)

    async def texts(self, number: int, ids: Sequence[int]) -> list[str] | None:
        """As `Tails.texts`; None if the files of the base model are not on this machine."""
        tails = await self._tails(number)
        return None if tails is None else await asyncio.to_thread(tails.texts, ids)

    async def _tails(self, number: int) -> Tails | None:
        if number not in self._loaded:
            async with self._lock:
                if number not in self._loaded:
                    self._loaded[number] = await asyncio.to_thread(self._load, number)
        return self._loaded[number]

    def _load(self, number: int) -> Tails | None:
        tails = Tails.load(self._base_models[number])
        if tails is None:
            logger.warning("no template or tokenizer on this machine: each turn of an agent session is rendered anew")
        return tails


def template_arguments(fields: Mapping[str, Any]) -> dict[str, Any]:
    """What a request gives to the template beside messages and tools, as vLLM does."""
    given = dict(fields.get("chat_template_kwargs") or {})
    if (effort := fields.get("reasoning_effort")) is not None:
        given = {"enable_thinking": effort != "none"} | given | {"reasoning_effort": effort}
    return given
