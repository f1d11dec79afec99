"""Patches of vLLM's API server: when it ends, what it refuses and repeats, where grammars and thoughts begin.

Knows how vLLM watches its engine's processes, checks requests, and reads prompts. What answers tell in addition is in
`answers`.
"""

from __future__ import annotations

import os
import time
from collections.abc import AsyncGenerator, Sequence
from functools import lru_cache
from multiprocessing import connection
from threading import Thread
from typing import Any

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.scale_out.token_in_token_out.serving import ServingTokens
from vllm.exceptions import GenerationError, VLLMValidationError
from vllm.multimodal.cache.lru import LruKeyReplicatedSenderCache
from vllm.parser.abstract_parser import DelegatingParser
from vllm.renderers.base import BaseRenderer
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import MPClient

ANSWERS_WITHIN_S = 1.5
"""The time that the API server has to tell its clients that the engine is dead."""
NOTED_WITHIN_S = 5.0
"""vLLM's own watch notes within a second whether an engine's end was asked for."""


def exit_with_engine() -> None:
    """Patch this process. A second call changes nothing."""
    original = MPClient.start_engine_core_monitor
    if original.__module__ == __name__:
        return

    def start_engine_core_monitor(client: Any) -> None:
        original(client)
        manager = client.resources.engine_manager
        if getattr(manager, "processes", None):  # an engine in a Ray cluster has none on this machine
            Thread(target=_watch, args=(manager,), daemon=True, name="skyrl-dead-engine").start()

    MPClient.start_engine_core_monitor = start_engine_core_monitor  # type: ignore[method-assign]


def _watch(manager: Any) -> None:
    """Wait until a process of the engine has ended. Exit if its end was not asked for."""
    connection.wait([process.sentinel for process in manager.processes])
    ended = time.monotonic()
    manager.manager_stopped.wait(NOTED_WITHIN_S)
    if manager.failed_proc_name is not None:
        time.sleep(max(0.0, ended + ANSWERS_WITHIN_S - time.monotonic()))
        os._exit(1)


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


def read_prompts() -> None:
    """Patch this process, which is vLLM's API server. A second call changes nothing."""
    ends, resolve = DelegatingParser.is_reasoning_end, ChatCompletionRequest.resolve_reasoning_ended
    if ends.__module__ == __name__:
        return

    def is_reasoning_end(self: Any, input_ids: list[int]) -> bool:
        return ends(self, input_ids) and ends(self, _last_message(self, input_ids))

    def set_prompt_token_ids(self: Any, prompt_token_ids: Sequence[int]) -> None:
        if (opens := getattr(self.reasoning_parser, "opens", None)) is not None:
            opens(prompt_token_ids)

    def resolve_reasoning_ended(self: Any, parser: Any, prompt_token_ids: list[int]) -> bool | None:
        opens = None if parser is None else getattr(parser.reasoning_parser, "opens", None)
        if opens is None or not self.include_reasoning:
            return resolve(self, parser, prompt_token_ids)
        return not opens(prompt_token_ids)

    DelegatingParser.is_reasoning_end = is_reasoning_end
    DelegatingParser.set_prompt_token_ids = set_prompt_token_ids
    ChatCompletionRequest.resolve_reasoning_ended = resolve_reasoning_ended


def _last_message(parser: Any, prompt: list[int]) -> list[int]:
    """The tokens behind the last special one that is no mark of thoughts."""
    thoughts, vocabulary = parser.reasoning_parser, parser.model_tokenizer.get_vocab()
    marks = {vocabulary.get(mark) for mark in (thoughts.reasoning_start_str, thoughts.reasoning_end_str)}
    borders = _special_ids(parser.model_tokenizer) - marks
    begin = next((at for at in range(len(prompt), 0, -1) if prompt[at - 1] in borders), 0)
    return prompt[begin:]


@lru_cache(maxsize=4)
def _special_ids(tokenizer: Any) -> frozenset[int]:
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return frozenset(tokenizer.all_special_ids).union(number for number, token in added.items() if token.special)


MAX_REPETITIONS = 3
"""In between, other requests may be refused whose pictures are the same."""

_forgotten = 0
"""How often this process has learned that the engine does not have a picture."""


def repeat_requests() -> None:
    """Patch this process, which is vLLM's API server. A second call changes nothing."""
    serve_tokens, invalidate = ServingTokens.serve_tokens, LruKeyReplicatedSenderCache.invalidate
    if serve_tokens.__module__ == __name__:
        return

    def noted(cache: Any, mm_hash: str) -> None:
        global _forgotten
        _forgotten += 1
        invalidate(cache, mm_hash)

    async def serve(serving: Any, request: Any, raw_request: Any = None) -> Any:
        for _ in range(MAX_REPETITIONS):
            before = _forgotten
            try:
                return await serve_tokens(serving, request, raw_request)
            except GenerationError:
                if not request.content_parts or _forgotten == before:
                    raise
        return await serve_tokens(serving, request, raw_request)

    LruKeyReplicatedSenderCache.invalidate = noted  # type: ignore[method-assign]
    ServingTokens.serve_tokens = serve  # type: ignore[method-assign]


def refuse_ids_beyond_rows() -> None:
    """Patch this process, which is vLLM's API server. A second call changes nothing."""
    validate = BaseRenderer.validate_token_ids
    if validate.__module__ == __name__:
        return

    def validate_token_ids(renderer: Any, token_ids: Sequence[int], *, parameter: str | None = None) -> None:
        validate(renderer, token_ids, parameter=parameter)
        config = renderer.model_config
        if not token_ids or config.is_multimodal_model:
            return
        if (highest := max(token_ids)) >= (rows := config.get_vocab_size()):
            raise VLLMValidationError(
                f"Token id {highest} is out of vocabulary: the model has {rows} rows, and its tokenizer more tokens",
                parameter=parameter,
            )

    BaseRenderer.validate_token_ids = validate_token_ids  # type: ignore[method-assign]
