"""Patches of what vLLM's answers tell: weight versions, prompt tokens found in the cache, and ids without text.

Knows how vLLM makes the answers of completions and chats, whole and in streams. Knows nothing of how they are sampled.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import asdict
from typing import Any

from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.v1.engine.output_processor import RequestState

from skyrl.inference.vllm_plugin.protocol import TOKENS_ONLY

VERSIONS = "weight_versions"
_ENDS = '"finish_reason":"'
"""In JSON, quotes inside a string have a backslash before them: this is in the last chunk of a sample alone."""


def tell_versions(*, early: bool = False) -> None:
    """Add `weight_versions` to the choices of answers: which version of the weights sampled which tokens.

    vLLM knows it, and tells it in `/inference/v1/generate` alone. A list of `{"version", "start", "end"}`: output
    tokens `[start, end)`. In a stream the last event of a choice has it. `/v1/completions` tells it always,
    `/v1/chat/completions` beside the token ids that it names.

    `early` (TELL_VERSIONS_VARIABLE is "1"): all chats tell it, and in a stream also an early event of each choice, with
    the versions until then: so a client knows which weights have begun an answer before it shows any of it.
    """
    _patch_whole_answers()
    _patch_completion_streams(early)
    if early:
        _patch_outputs()
    _patch_chats(early)
    _patch_chat_streams(early)


def _patch_outputs() -> None:
    """vLLM gives the versions with the last output of a request; give them with every output."""
    original = RequestState._new_completion_output

    def patched(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = original(self, *args, **kwargs)
        if output.weight_versions is None:
            output.weight_versions = self._weight_version_spans()
        return output

    RequestState._new_completion_output = patched  # type: ignore[method-assign]


def _patch_whole_answers() -> None:
    original = OpenAIServingCompletion.request_output_to_completion_response

    def patched(self: Any, final_res_batch: list[Any], *args: Any, **kwargs: Any) -> Any:
        response = original(self, final_res_batch, *args, **kwargs)
        outputs = [output for result in final_res_batch for output in result.outputs]
        for choice, output in zip(response.choices, outputs, strict=True):
            if output.weight_versions is not None:
                setattr(choice, VERSIONS, _spans(output))
        return response

    OpenAIServingCompletion.request_output_to_completion_response = patched  # type: ignore[method-assign]


def _patch_chats(early: bool) -> None:
    original = OpenAIServingChat.chat_completion_full_generator

    async def patched(self: Any, request: Any, result_generator: AsyncIterator[Any], *args: Any, **kwargs: Any) -> Any:
        if not (early or request.return_token_ids):
            return await original(self, request, result_generator, *args, **kwargs)
        spans: dict[int, list[dict[str, Any]]] = {}
        response = await original(self, request, _noting(result_generator, spans), *args, **kwargs)
        for choice in getattr(response, "choices", ()):  # an error has none
            if choice.index in spans:
                setattr(choice, VERSIONS, spans[choice.index])
        return response

    OpenAIServingChat.chat_completion_full_generator = patched  # type: ignore[method-assign]


def _patch_completion_streams(early: bool) -> None:
    original = OpenAIServingCompletion.completion_stream_generator

    async def patched(
        self: Any,
        request: Any,
        engine_inputs: Any,
        result_generator: AsyncIterator[tuple[int, Any]],
        *args: Any,
        **kwargs: Any,
    ) -> AsyncGenerator[str]:
        spans: dict[int, list[dict[str, Any]]] = {}
        choices = 1 if request.n is None else request.n

        async def watched() -> AsyncIterator[tuple[int, Any]]:
            async for prompt, result in result_generator:
                for output in result.outputs:
                    if output.weight_versions is not None:
                        spans[output.index + prompt * choices] = _spans(output)
                yield prompt, result

        events = original(self, request, engine_inputs, watched(), *args, **kwargs)
        async for event in _telling(events, spans, early):
            yield event

    OpenAIServingCompletion.completion_stream_generator = patched  # type: ignore[method-assign]


def _patch_chat_streams(early: bool) -> None:
    original = OpenAIServingChat.chat_completion_stream_generator

    async def patched(
        self: Any, request: Any, result_generator: AsyncIterator[Any], *args: Any, **kwargs: Any
    ) -> AsyncGenerator[str]:
        spans: dict[int, list[dict[str, Any]]] = {}
        tells = early or request.return_token_ids
        results = _noting(result_generator, spans) if tells else result_generator
        async for event in _telling(original(self, request, results, *args, **kwargs), spans, early):
            yield event

    OpenAIServingChat.chat_completion_stream_generator = patched  # type: ignore[method-assign]


async def _noting(results: AsyncIterator[Any], spans: dict[int, list[dict[str, Any]]]) -> AsyncIterator[Any]:
    async for result in results:
        for output in result.outputs:
            if output.weight_versions is not None:
                spans[output.index] = _spans(output)
        yield result


async def _telling(
    events: AsyncIterator[str], spans: dict[int, list[dict[str, Any]]], early: bool
) -> AsyncGenerator[str]:
    told: set[int] = set()
    async for event in events:
        if spans and (_ENDS in event or (early and not spans.keys() <= told)):
            yield _with_spans(event, spans, told, early)
        else:
            yield event


def _with_spans(event: str, spans: dict[int, list[dict[str, Any]]], told: set[int], early: bool) -> str:
    try:
        chunk = json.loads(event.removeprefix("data: "))
    except ValueError:  # the end, which is no JSON
        return event
    for choice in chunk.get("choices", ()):
        index = choice["index"]
        if index in spans and (choice.get("finish_reason") or (early and index not in told)):
            told.add(index)
            choice[VERSIONS] = spans[index]
    return f"data: {json.dumps(chunk, ensure_ascii=False, separators=(',', ':'))}\n\n"


def _spans(output: Any) -> list[dict[str, Any]]:
    return [asdict(span) for span in output.weight_versions]


CACHED_TOKENS = "cached_prompt_tokens"


def tell_cached_prompts() -> None:
    """Add `cached_prompt_tokens` to the choices of a completion with several sequences: how many tokens of the
    prompt each has found in the prefix cache.

    vLLM tells that of the sequence alone that ends last, as the usage of the request. So nobody sees that a group has
    computed its prompt several times.
    """
    new_output = RequestState._new_completion_output
    to_response = OpenAIServingCompletion.request_output_to_completion_response

    def noting(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = new_output(self, *args, **kwargs)
        setattr(output, CACHED_TOKENS, self.num_cached_tokens)
        return output

    def telling(self: Any, final_res_batch: list[Any], *args: Any, **kwargs: Any) -> Any:
        response = to_response(self, final_res_batch, *args, **kwargs)
        several = any(len(result.outputs) > 1 for result in final_res_batch)
        outputs = [output for result in final_res_batch for output in result.outputs]
        for choice, output in zip(response.choices, outputs, strict=True) if several else ():
            if hasattr(output, CACHED_TOKENS):  # vLLM's beam search makes its outputs itself
                setattr(choice, CACHED_TOKENS, getattr(output, CACHED_TOKENS))
        return response

    RequestState._new_completion_output = noting  # type: ignore[method-assign]
    OpenAIServingCompletion.request_output_to_completion_response = telling  # type: ignore[method-assign]


_MARK = "skyrl_tokens_only"
_MARKED = object()
"""The value of the mark. No JSON has it, so the body of a request cannot set the mark."""


def allow_tokens_only() -> None:
    """Leave the text out of completions for clients that want token ids and logprobs alone.

    vLLM turns every sampled token into text twice: for the text of the answer, and for the name of its logprob. A
    request with the header TOKENS_ONLY gets an empty text, no names and offsets of tokens, and no ids of its prompt.
    Alternatives are named by id (`token_id:7`). Requests with stop strings keep their text, because vLLM looks for the
    strings there; so do streams. A server without the plugin ignores the header.
    """
    create, to_parameters = OpenAIServingCompletion.create_completion, CompletionRequest.to_sampling_params
    to_response = OpenAIServingCompletion.request_output_to_completion_response

    async def create_completion(self: Any, request: Any, raw_request: Any = None) -> Any:
        if raw_request is not None and TOKENS_ONLY in raw_request.headers and not (request.stop or request.stream):
            setattr(request, _MARK, _MARKED)
            request.return_tokens_as_token_ids = True
        return await create(self, request, raw_request)

    def to_sampling_params(self: Any, *args: Any, **kwargs: Any) -> Any:
        parameters = to_parameters(self, *args, **kwargs)
        if getattr(self, _MARK, None) is _MARKED:
            parameters.detokenize = False
        return parameters

    def request_output_to_completion_response(self: Any, results: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        response = to_response(self, results, request, *args, **kwargs)
        if getattr(request, _MARK, None) is _MARKED:
            for choice in response.choices:
                choice.prompt_token_ids = None
                if choice.logprobs is not None:
                    choice.logprobs.tokens, choice.logprobs.text_offset = [], []
                    if not (
                        request.logprobs or request.logprob_token_ids
                    ):  # the token itself is the only entry of each position
                        choice.logprobs.top_logprobs = []
        return response

    OpenAIServingCompletion.create_completion = create_completion  # type: ignore[method-assign]
    CompletionRequest.to_sampling_params = to_sampling_params  # type: ignore[method-assign]
    OpenAIServingCompletion.request_output_to_completion_response = request_output_to_completion_response  # type: ignore[method-assign]
