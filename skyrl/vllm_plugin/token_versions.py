"""Adds `weight_versions` to the choices of `/v1/completions`: which version of the weights sampled which tokens.

vLLM knows it, and tells it in `/inference/v1/generate` alone. A list of `{"version", "start", "end"}`: output tokens
`[start, end)`. In a stream the last chunk of a sample has it.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import asdict
from typing import Any

from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion

FIELD = "weight_versions"
_ENDS = '"finish_reason":"'
"""In JSON, quotes inside a string have a backslash before them: this is in the last chunk of a sample alone."""


def tell_versions() -> None:
    """Patch this process. A second call changes nothing."""
    if getattr(OpenAIServingCompletion.request_output_to_completion_response, "tells", False):
        return
    _patch_whole_answers()
    _patch_streams()


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


def _patch_streams() -> None:
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

        async for event in original(self, request, engine_inputs, watched(), *args, **kwargs):
            yield _with_spans(event, spans) if spans and _ENDS in event else event

    OpenAIServingCompletion.completion_stream_generator = patched  # type: ignore[method-assign]


def _with_spans(event: str, spans: dict[int, list[dict[str, Any]]]) -> str:
    chunk = json.loads(event.removeprefix("data: "))
    for choice in chunk.get("choices", ()):
        if choice["index"] in spans and choice.get("finish_reason"):
            choice[FIELD] = spans.pop(choice["index"])
    return f"data: {json.dumps(chunk, ensure_ascii=False, separators=(',', ':'))}\n\n"


def _spans(output: Any) -> list[dict[str, Any]]:
    return [asdict(span) for span in output.weight_versions]
