"""Patches of vLLM's API server. `patch_server` is their index.

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
from vllm.entrypoints.serve.middleware import authenticate
from vllm.exceptions import GenerationError, VLLMValidationError
from vllm.multimodal.cache.lru import LruKeyReplicatedSenderCache
from vllm.parser.abstract_parser import DelegatingParser
from vllm.renderers.base import BaseRenderer
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import MPClient

from skyrl.inference.vllm_plugin.answers import allow_tokens_only, tell_cached_prompts, tell_versions
from skyrl.inference.vllm_plugin.logprobs import tell_marks
from skyrl.inference.vllm_plugin.prompt_cells import send_prompt_cells
from skyrl.inference.vllm_plugin.waits import show_waits

ANSWERS_WITHIN_S = 1.5
"""The time that the API server has to tell its clients that the engine is dead."""
NOTED_WITHIN_S = 5.0
"""vLLM's own watch notes within a second whether an engine's end was asked for."""


def patch_server(*, early_versions: bool) -> None:
    """The patches of the API server, beside those of each process. `early_versions`: as TELL_VERSIONS_VARIABLE says."""
    exit_with_engine()
    hold_from_the_start()
    read_prompts()
    allow_tokens_only()
    tell_cached_prompts()
    repeat_requests()
    send_prompt_cells()
    show_waits()
    tell_marks()
    refuse_ids_beyond_rows()
    tell_versions(early=early_versions)
    guard_all_endpoints()


def guard_all_endpoints() -> None:
    """Require the API key on every path. vLLM leaves /pause, /sleep and /collective_rpc open."""
    authenticate.GUARDED_PREFIX = "/"


def exit_with_engine() -> None:
    """End the API server soon after its engine has died, so that its supervisor starts both again.

    After such a death vLLM fails the requests in flight and exits, but it waits for all requests first. A request that
    the engine will never answer, for example to load an adapter, then keeps a server without an engine for ever.
    """
    original = MPClient.start_engine_core_monitor

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
    """Let a grammar hold from the first token where an answer is no chat's.

    With a reasoning parser, vLLM 0.32 applies a request's grammar when thinking has ended. For a chat the prompt tells
    whether thinking is ahead. Completions and requests with token ids have any prompt, most without the mark of
    thinking's end: their grammars would never begin. vLLM's route of chats alone says what the engine should do; where
    nothing is said, thinking has ended.
    """
    add_request = AsyncLLM.add_request

    async def add(engine: Any, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        unsaid = kwargs.get("reasoning_ended") is None and kwargs.get("reasoning_parser_kwargs") is None
        if unsaid and not isinstance(prompt, AsyncGenerator):
            kwargs["reasoning_ended"] = True
        return await add_request(engine, request_id, prompt, params, *args, **kwargs)

    AsyncLLM.add_request = add  # type: ignore[method-assign]


def read_prompts() -> None:
    """Find from the prompt whether thoughts are open when an answer begins.

    Some parsers of vLLM 0.32 look for the last mark of thoughts in the whole prompt. Where a template does not open
    thoughts itself (Kimi-K2-Thinking, MiniMax-M3), that is the mark of an earlier answer or of the system message: the
    thoughts of a stream were then content. Here only the marks behind the last special token count, which ends or
    begins a message. The parser `WrittenThoughts` also gets the prompt of an answer that is not streamed, and says
    where a grammar begins.
    """
    ends, resolve = DelegatingParser.is_reasoning_end, ChatCompletionRequest.resolve_reasoning_ended

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
    """Compute requests whose pictures the engine has lost.

    The API server processes a picture, and remembers that the engine has the result: later requests with this picture
    send its name alone. But the engine may not have it. The first request was refused after its pictures were
    processed, or its client left, or the engine dropped the picture earlier than the API server forgot it. Then vLLM
    0.32 answers 500 and forgets that the engine has the picture, so that the next request sends it again. Here the API
    server repeats the request at once.
    """
    serve_tokens, invalidate = ServingTokens.serve_tokens, LruKeyReplicatedSenderCache.invalidate

    def invalidate_and_count(cache: Any, mm_hash: str) -> None:
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

    LruKeyReplicatedSenderCache.invalidate = invalidate_and_count  # type: ignore[method-assign]
    ServingTokens.serve_tokens = serve  # type: ignore[method-assign]


def refuse_ids_beyond_rows() -> None:
    """Refuse token ids for which the model has no row, though its tokenizer has them.

    vLLM 0.32 takes every id that the tokenizer or the model has, because models that see have placeholders beyond their
    rows. A model without pictures looks such an id up in its embedding: on a CPU an error that ends the engine core.
    Gemma 3's tokenizer has one id more than its small models have rows.
    """
    validate = BaseRenderer.validate_token_ids

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
