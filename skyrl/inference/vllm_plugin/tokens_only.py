"""Completions without text, for clients that want token ids and logprobs alone.

vLLM turns every sampled token into text twice: for the text of the answer, and for the name of its logprob. A request
with the header TOKENS_ONLY gets an empty text, no names and offsets of tokens, and no ids of its prompt. Alternatives
are named by id (`token_id:7`). Requests with stop strings keep their text, because vLLM looks for the strings there; so
do streams. A server without the plugin ignores the header.
"""

from __future__ import annotations

from typing import Any

from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion

from skyrl.inference.vllm_plugin.tokens_header import TOKENS_ONLY

_MARK = "skyrl_tokens_only"
_MARKED = object()
"""The value of the mark. No JSON has it, so the body of a request cannot set the mark."""


def allow_tokens_only() -> None:
    """Patch this process, which is vLLM's API server. A second call changes nothing."""
    create, to_parameters = OpenAIServingCompletion.create_completion, CompletionRequest.to_sampling_params
    to_response = OpenAIServingCompletion.request_output_to_completion_response
    if getattr(create, _MARK, False):
        return

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

    setattr(create_completion, _MARK, True)
    OpenAIServingCompletion.create_completion = create_completion  # type: ignore[method-assign]
    CompletionRequest.to_sampling_params = to_sampling_params  # type: ignore[method-assign]
    OpenAIServingCompletion.request_output_to_completion_response = request_output_to_completion_response  # type: ignore[method-assign]
