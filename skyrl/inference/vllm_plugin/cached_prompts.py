"""Adds `cached_prompt_tokens` to the choices of a completion with several sequences: how many tokens of the prompt each
has found in the prefix cache.

vLLM tells that of the sequence alone that ends last, as the usage of the request. So nobody sees that a group has
computed its prompt several times.
"""

from __future__ import annotations

from typing import Any

from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.v1.engine.output_processor import RequestState

FIELD = "cached_prompt_tokens"


def tell_cached_prompts() -> None:
    """Patch this process. A second call changes nothing."""
    if getattr(RequestState._new_completion_output, "tells", False):
        return
    new_output = RequestState._new_completion_output
    to_response = OpenAIServingCompletion.request_output_to_completion_response

    def noting(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = new_output(self, *args, **kwargs)
        setattr(output, FIELD, self.num_cached_tokens)
        return output

    def telling(self: Any, final_res_batch: list[Any], *args: Any, **kwargs: Any) -> Any:
        response = to_response(self, final_res_batch, *args, **kwargs)
        several = any(len(result.outputs) > 1 for result in final_res_batch)
        outputs = [output for result in final_res_batch for output in result.outputs]
        for choice, output in zip(response.choices, outputs, strict=True) if several else ():
            setattr(choice, FIELD, getattr(output, FIELD))
        return response

    noting.tells = True  # type: ignore[attr-defined]
    RequestState._new_completion_output = noting  # type: ignore[method-assign]
    OpenAIServingCompletion.request_output_to_completion_response = telling  # type: ignore[method-assign]
