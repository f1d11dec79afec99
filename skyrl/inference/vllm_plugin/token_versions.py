"""Adds `weight_versions` to the choices of vLLM's answers: which version of the weights sampled which tokens.

vLLM knows it, and tells it in `/inference/v1/generate` alone. A list of `{"version", "start", "end"}`: output tokens
`[start, end)`. In a stream the last event of a choice has it.

`/v1/completions` tells it always, `/v1/chat/completions` beside the token ids that it names. Where
TELL_VERSIONS_VARIABLE is "1", all chats tell it, and in a stream also an early event of each choice, with the versions
until then: so a client knows which weights have begun an answer before it shows any of it.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import asdict
from typing import Any

from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.v1.engine.output_processor import RequestState

FIELD = "weight_versions"
_ENDS = '"finish_reason":"'
"""In JSON, quotes inside a string have a backslash before them: this is in the last chunk of a sample alone."""


def tell_versions(*, early: bool = False) -> None:
    """Patch this process. A second call changes nothing. `early`: as TELL_VERSIONS_VARIABLE says."""
    if getattr(OpenAIServingCompletion.request_output_to_completion_response, "tells", False):
        return
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
                setattr(choice, FIELD, _spans(output))
        return response

    patched.tells = True  # type: ignore[attr-defined]
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
                setattr(choice, FIELD, spans[choice.index])
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
            choice[FIELD] = spans[index]
    return f"data: {json.dumps(chunk, ensure_ascii=False, separators=(',', ':'))}\n\n"


def _spans(output: Any) -> list[dict[str, Any]]:
    return [asdict(span) for span in output.weight_versions]
