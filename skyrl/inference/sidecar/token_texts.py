"""The text of single token ids, from vLLM. Remembers texts, because logprobs name the same tokens again and again."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from skyrl.inference.sidecar.errors import VllmBroke
from skyrl.inference.sidecar.vllm import Vllm

REMEMBERED = 300_000
"""More than the vocabularies of today's models have tokens."""
AT_A_TIME = 32


class TokenTexts:
    def __init__(self, vllm: Vllm) -> None:
        self._vllm = vllm
        self._texts: dict[int, str] = {}
        self._asking = asyncio.Semaphore(AT_A_TIME)

    def forget(self) -> None:
        """vLLM was away: the next one may have another tokenizer."""
        self._texts.clear()

    async def of(self, tokens: Iterable[int]) -> dict[int, str]:
        """The text of each of the tokens. Raises SidecarError."""
        wanted = {*tokens}
        if unknown := wanted - self._texts.keys():
            if len(self._texts) + len(unknown) > REMEMBERED:
                self._texts.clear()
                unknown = wanted
            async with asyncio.TaskGroup() as group:
                asked = {token: group.create_task(self._ask(token)) for token in unknown}
            self._texts |= {token: task.result() for token, task in asked.items()}
        return {token: self._texts[token] for token in wanted}

    async def _ask(self, token: int) -> str:
        async with self._asking:
            answer = await self._vllm.call("POST", "/detokenize", {"tokens": [token]})
        text = answer.get("prompt") if isinstance(answer, dict) else None
        if not isinstance(text, str):
            raise VllmBroke("vLLM's /detokenize answered no text")
        return text
