"""Every field of the installed vLLM's requests is honoured, refused by its name, or left out because it changes no
answer. A field that a new version of vLLM brings fails here, and must be put into one of the three."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from vllm_sources import fields_of

from skyrl.base.types.context_limits import ContextLimits
from skyrl.base.wire.errors import RequestError
from skyrl.chat.openai import fields as known
from skyrl.chat.openai.fields import ChatFields, CompletionFields, GenerateFields, SamplingParams
from skyrl.chat.openai.generation import Generation, chat, completion, generate
from tests.e2e.vllm_fields import CHAT, COMPLETIONS, EFFECTS, ELSEWHERE, GENERATE, NO_EFFECT
from tests.pages import ROOT

LIMITS = ContextLimits(vocab_size=1000, max_context=4096)
OPENAI = "vllm.entrypoints.openai"
UNKNOWN_HERE = {
    "ec_transfer_params": "belongs to the server",
    "length_penalty": "of beam search, which is refused",
    "mm_payload": "pictures come in messages",
    "repetition_detection": "ends answers in a way that no client here has asked for",
    "return_mm_kwargs": "of vLLM's own routes for rendering",
    "return_token_offsets": "of vLLM's own routes for rendering",
    "routed_experts_prompt_start": "served by `generate`",
    "watermarking": "vLLM runs without a watermark",
}
"""Fields of completions and chats that are refused as unknown."""
INTERNAL = {"output_text_buffer_length"}
"""Fields of SamplingParams that vLLM sets itself; refused as unknown."""


@dataclass(frozen=True)
class Request:
    """A class of vLLM, and what this server has of it. `make` makes a request with one more field."""

    vllm: str
    accepted: type[msgspec.Struct]
    refused: Mapping[str, Any]
    unknown: set[str]
    make: Callable[[dict[str, Any]], Generation]
    within: str = ""


def _with_params(more: dict[str, Any]) -> Generation:
    return generate(json.dumps({"token_ids": [5], "sampling_params": more}).encode(), LIMITS)


def _with(check: Callable[..., Generation], base: dict[str, Any]) -> Callable[[dict[str, Any]], Generation]:
    return lambda more: check(json.dumps(base | more).encode(), LIMITS)


REQUESTS = {
    COMPLETIONS: Request(
        f"{OPENAI}.completion.protocol.CompletionRequest",
        CompletionFields,
        known.REFUSED,
        set(UNKNOWN_HERE),
        _with(completion, {"prompt": "x"}),
    ),
    CHAT: Request(
        f"{OPENAI}.chat_completion.protocol.ChatCompletionRequest",
        ChatFields,
        known.REFUSED,
        set(UNKNOWN_HERE),
        _with(chat, {"messages": [{"role": "user", "content": "x"}]}),
    ),
    GENERATE: Request(
        "vllm.entrypoints.scale_out.token_in_token_out.protocol.GenerateRequest",
        GenerateFields,
        known.REFUSED_OF_GENERATE,
        set(),
        _with(generate, {"token_ids": [5], "sampling_params": {}}),
    ),
    "sampling_params": Request(
        "vllm.sampling_params.SamplingParams",
        SamplingParams,
        known.REFUSED_OF_SAMPLING,
        INTERNAL,
        _with_params,
        "sampling_params.",
    ),
}


@pytest.mark.parametrize("request_of", REQUESTS)
def test_every_field_of_vllm_is_honoured_refused_or_without_effect(request_of: str) -> None:
    request = REQUESTS[request_of]
    of_vllm, accepted = fields_of(request.vllm), set(request.accepted.__struct_fields__)
    assert accepted <= of_vllm, "vLLM ignores a field that it does not have"
    assert of_vllm - accepted - request.refused.keys() - known.WITHOUT_EFFECT == request.unknown
    for name in of_vllm - accepted - known.WITHOUT_EFFECT:
        with pytest.raises(RequestError) as refused:
            request.make({name: ["anything"]})
        assert refused.value.field == request.within + name
    for name in of_vllm & known.WITHOUT_EFFECT:
        request.make({name: "anything"})


@pytest.mark.parametrize("path", EFFECTS)
def test_every_honoured_field_has_a_test_of_its_effect(path: str) -> None:
    accepted = set(REQUESTS[path].accepted.__struct_fields__)
    if path == GENERATE:
        accepted = accepted - {"sampling_params"} | set(SamplingParams.__struct_fields__)
    assert accepted == (EFFECTS[path].keys() | (ELSEWHERE.keys() | NO_EFFECT.keys()) & accepted)
    assert not EFFECTS[path].keys() & (ELSEWHERE.keys() | NO_EFFECT.keys())


@pytest.mark.parametrize("name", sorted(set(ELSEWHERE.values())))
def test_the_tests_that_are_named_exist(name: str) -> None:
    path, _, test = name.partition("::")
    assert f"def {test}(" in (ROOT / path).read_text()
