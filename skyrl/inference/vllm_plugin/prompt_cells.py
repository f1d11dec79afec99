"""Logprobs of prompts as arrays, from the engine's tensors to the answer.

vLLM's API server makes an object of every cell of a prompt's logprobs, and JSON of every object: some 9 us for each on
its only event loop. The largest sample, of half a million cells, stopped the answers of all tenants for seconds. A
request whose header TOKENS_ONLY says PROMPT_CELLS gets two arrays in base64 instead: 11 bytes a cell, and no object.
Other requests get what vLLM gives.

Knows vLLM's two routes of samples and its processor of logprobs. Does not know which cells a client shows.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
import numpy.typing as npt
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateTokensResponse
from vllm.entrypoints.scale_out.token_in_token_out.serving import ServingTokens
from vllm.v1.engine.logprobs import LogprobsProcessor

from skyrl.inference.vllm_plugin.protocol import PROMPT_CELLS, TOKENS_ONLY, pack_cells

LOWEST = np.float32(-9999.0)
"""What vLLM writes for minus infinity."""

_wanted: ContextVar[bool] = ContextVar("skyrl_prompt_cells", default=False)
"""Whether the request of this task wants arrays. vLLM copies a request's parameters, and drops what it does not know;
it adds the request to its processors in the request's own task."""


class PromptCells:
    """The logprobs of one prompt. It takes the place of vLLM's list in its processor and its outputs."""

    def __init__(self) -> None:
        self._parts: list[tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]] = []

    def add(self, tensors: Any) -> None:
        """The next rows: vLLM's `LogprobsTensors` with ids and logprobs [rows, columns], the own token first."""
        token_ids, logprobs, *_ = tensors
        self._parts.append((token_ids.numpy(), logprobs.numpy()))

    def packed(self, prompt_tokens: int) -> str:
        """All cells, for the answer. The rows that the plugin appends have the same cell in every column."""
        if not self._parts:  # a prompt of one token
            return ""
        ids, values = (np.concatenate(arrays) for arrays in zip(*self._parts, strict=True))
        values = np.where(np.isneginf(values), LOWEST, values)
        own = prompt_tokens - 1
        return pack_cells(*(np.concatenate([each[:own].ravel(), each[own:, 0]]) for each in (ids, values)))


class CellsResponse(GenerateTokensResponse):
    prompt_cells: str


def send_prompt_cells() -> None:
    """Answer requests that want it with `prompt_cells` in place of `prompt_logprobs`."""
    _patch_processor()
    _patch_completions()
    _patch_generations()


def _patch_processor() -> None:
    make, update = LogprobsProcessor.from_new_request, LogprobsProcessor._update_prompt_logprobs

    def from_new_request(cls: Any, *args: Any, **kwargs: Any) -> LogprobsProcessor:
        made: Any = make(*args, **kwargs)
        if made.prompt_logprobs is not None and _wanted.get():
            made.prompt_logprobs = PromptCells()
        return made

    def update_prompt_logprobs(self: Any, tensors: Any) -> None:
        if isinstance(self.prompt_logprobs, PromptCells):
            self.prompt_logprobs.add(tensors)
        else:
            update(self, tensors)

    LogprobsProcessor.from_new_request = classmethod(from_new_request)  # type: ignore[assignment,method-assign]
    LogprobsProcessor._update_prompt_logprobs = update_prompt_logprobs  # type: ignore[method-assign]


def _patch_completions() -> None:
    create = OpenAIServingCompletion.create_completion
    to_response = OpenAIServingCompletion.request_output_to_completion_response

    async def create_completion(self: Any, request: Any, raw_request: Any = None) -> Any:
        with _wanting(raw_request, request.stream or request.echo):
            return await create(self, request, raw_request)

    def request_output_to_completion_response(self: Any, results: Any, *args: Any, **kwargs: Any) -> Any:
        # skyrl reads those of the first choice: they are a prompt's, and large
        cells = [cell for result in results for cell in [_taken(result), *[None] * (len(result.outputs) - 1)]]
        response = to_response(self, results, *args, **kwargs)
        for choice, packed in zip(response.choices, cells, strict=True):
            if packed is not None:
                setattr(choice, PROMPT_CELLS, packed)
        return response

    OpenAIServingCompletion.create_completion = create_completion  # type: ignore[method-assign]
    OpenAIServingCompletion.request_output_to_completion_response = request_output_to_completion_response  # type: ignore[method-assign]


def _patch_generations() -> None:
    serve, generate = ServingTokens.serve_tokens, ServingTokens.serve_tokens_full_generator

    async def serve_tokens(self: Any, request: Any, raw_request: Any = None) -> Any:
        with _wanting(raw_request, request.stream or request.output_mode != "tokens"):
            return await serve(self, request, raw_request)

    async def full(self: Any, request: Any, results: AsyncIterator[Any], *args: Any, **kwargs: Any) -> Any:
        packed: list[str] = []

        async def without() -> AsyncIterator[Any]:
            async for result in results:
                if (cells := _taken(result)) is not None:
                    packed[:] = [cells]
                yield result

        response = await generate(self, request, without(), *args, **kwargs)  # type: ignore[arg-type]
        if packed and isinstance(response, GenerateTokensResponse):
            return CellsResponse.model_construct(**dict(response), prompt_cells=packed[0])
        return response

    ServingTokens.serve_tokens = serve_tokens  # type: ignore[method-assign]
    ServingTokens.serve_tokens_full_generator = full  # type: ignore[method-assign]


@contextmanager
def _wanting(raw_request: Any, otherwise: bool) -> Iterator[None]:
    token = _wanted.set(
        not otherwise and raw_request is not None and raw_request.headers.get(TOKENS_ONLY) == PROMPT_CELLS
    )
    try:
        yield
    finally:
        _wanted.reset(token)


def _taken(result: Any) -> str | None:
    """The packed cells of one of vLLM's outputs, which has none any more; None if the request wants no arrays."""
    cells = result.prompt_logprobs
    if not isinstance(cells, PromptCells):
        return None
    result.prompt_logprobs = None
    return cells.packed(len(result.prompt_token_ids))
