"""Lets a grammar hold from the first token where an answer is no chat's.

With a reasoning parser, vLLM 0.32 applies a request's grammar when thinking has ended. For a chat the prompt tells
whether thinking is ahead. Completions and requests with token ids have any prompt, most without the mark of thinking's
end: their grammars would never begin. vLLM's route of chats alone says what the engine should do; where nothing is
said, thinking has ended.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from vllm.v1.engine.async_llm import AsyncLLM


def hold_from_the_start() -> None:
    """Patch this process, which is vLLM's API server. A second call changes nothing."""
    add_request = AsyncLLM.add_request
    if add_request.__module__ == __name__:
        return

    async def add(engine: Any, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        unsaid = kwargs.get("reasoning_ended") is None and kwargs.get("reasoning_parser_kwargs") is None
        if unsaid and not isinstance(prompt, AsyncGenerator):
            kwargs["reasoning_ended"] = True
        return await add_request(engine, request_id, prompt, params, *args, **kwargs)

    AsyncLLM.add_request = add  # type: ignore[method-assign]
