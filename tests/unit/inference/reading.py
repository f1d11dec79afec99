"""Reads answers with vLLM's parsers, whole and token by token, with a tokenizer of single bytes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from typing import Any

Read = tuple[str | None, str | None, list[tuple[str, Any]]]
"""Thoughts and text without white space around them, and name and arguments of each call."""
ENDS = (
    *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "</s>", "<end_of_turn>", "<turn|>", "<|return|>", "[e~[", "<|eot|>"),
    *("<|assistant_end|>", "<｜end▁of▁sentence｜>", "<|end_of_text|>", "<seed:eos>", "<|role_end|>", "<|user|>"),
    *("<｜hy_eos:opensource｜>", "</assistant>", "<sep>", "\n<SPECIAL_12>", "<|observation|>", "<|tool_response>"),
)
"""What ends an answer in one template or another. vLLM gives its token, and leaves it out of the text."""
TURNS = (
    "<|im_start|>",
    "<|im_user|>",
    "<seed:bos>",
    "<|turn>",
    "<|start_header_id|>",
    "<|start_of_role|>",
    "]~b]",
    "]!b]",
)
"""What begins a message in one template or another, where vLLM looks for it."""


@cache
def use_plugin() -> None:
    """Change vLLM in this process as its plugin does, as far as parsers go. Only once: patches would pile up."""
    import_module("skyrl.inference.vllm_plugin.patches").add_parsers()
    import_module("skyrl.inference.vllm_plugin.server_patches").read_prompts()


def tokenizer_of(markers: Sequence[str], *, special: bool) -> Any:
    tokenizers, transformers = import_module("tokenizers"), import_module("transformers")
    bytes_of_text = tokenizers.pre_tokenizers.ByteLevel
    alphabet = {character: number for number, character in enumerate(sorted(bytes_of_text.alphabet()))}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=alphabet, merges=[]))
    made.pre_tokenizer = bytes_of_text(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    suffix = ":opensource" if any(marker.endswith(":opensource>") for marker in markers) else ""
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", token_suffix=suffix
    )
    wrapped.add_tokens([tokenizers.AddedToken(end.strip(), special=True, normalized=False) for end in (*ENDS, *TURNS)])
    wrapped.add_tokens([tokenizers.AddedToken(marker, special=special, normalized=False) for marker in markers])
    return wrapped


def read(
    parsers: tuple[str | None, str | None],
    tokenizer: Any,
    tools: Sequence[dict[str, Any]],
    answer: str,
    *,
    prompt: str = "",
    arguments: Mapping[str, Any] | None = None,
    special: bool = False,
    whole_text: bool = True,
) -> Read | None:
    """What vLLM's parsers, of calls and of thoughts, find in an answer to a chat with `tools`, which is the same whole
    and streamed. None if the markers are special tokens, which the request leaves out of the text. Without `whole_text`
    the text beside calls may differ."""
    protocol = import_module("vllm.entrypoints.openai.chat_completion.protocol")
    manager = import_module("vllm.parser.parser_manager").ParserManager
    only = import_module("vllm.entrypoints.serve.utils.tool_calls_utils").maybe_filter_parallel_tool_calls
    request = protocol.ChatCompletionRequest(
        model="m",
        messages=[{"role": "user", "content": "?"}],
        tools=list(tools),
        chat_template_kwargs=dict(arguments or {}),
    )
    kind = manager.get_parser(*parsers, True, "m", tokenizer=tokenizer)

    def parser() -> Any:
        made = kind(tokenizer, request.tools, chat_template_kwargs=dict(arguments or {}))
        made.set_prompt_token_ids(begun)
        return made

    begun = tokenizer.encode(prompt, add_special_tokens=False)
    request = parser().adjust_request(request)
    if special and request.skip_special_tokens:
        return None
    ids = tokenizer.encode(answer, add_special_tokens=False)
    end = tokenizer.encode("</s>", add_special_tokens=False)
    texts = [
        tokenizer.decode(ids[:count], skip_special_tokens=request.skip_special_tokens) for count in range(len(ids))
    ]
    text = tokenizer.decode(ids, skip_special_tokens=request.skip_special_tokens)
    thoughts, content, calls = parser().parse(
        text, request, enable_auto_tools=True, model_output_token_ids=[*ids, *end]
    )
    calls = only(calls or [], request)
    whole = found(thoughts, content, [(call.name, call.arguments) for call in calls])

    streaming, told, content, named = parser(), "", "", dict[int, list[str]]()
    for before, after, token in zip([*texts, text], [*texts[1:], text, text], [*ids, *end], strict=True):
        event = streaming.parse_delta(
            after[len(before) :], [token], request, prompt_token_ids=begun, finished=token == end[0]
        )
        event = event and only(event, request)
        told += (event and event.reasoning) or ""
        content += (event and event.content) or ""
        for call in (event and event.tool_calls) or ():
            parts = named.setdefault(call.index, ["", ""])
            parts[0] += (call.function and call.function.name) or ""
            parts[1] += (call.function and call.function.arguments) or ""
    streamed = found(told, content, [(name, given) for _, (name, given) in sorted(named.items())])
    if not whole_text and calls:
        whole, streamed = (whole[0], None, whole[2]), (streamed[0], None, streamed[2])
    assert whole == streamed
    return whole


def found(thoughts: str | None, content: str | None, calls: Sequence[tuple[str, str]]) -> tuple[Any, Any, Any]:
    stripped = [(text or "").strip() or None for text in (thoughts, content)]
    return stripped[0], stripped[1], [(name, json.loads(given)) for name, given in calls]
