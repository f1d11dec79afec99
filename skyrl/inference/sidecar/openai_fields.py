"""The fields of vLLM's routes that sample, and what becomes of those that vLLM does not have.

vLLM ignores a field that it does not know, and samples as if the client had not sent it. So each field of SGLang's
dialect, of OpenAI's, and of earlier versions of vLLM is one of three: served, refused by name, or without an effect on
what is sampled. At completions and chat completions a field that is none of them is refused, too; so is one of vLLM's
that it honours by half. Knows no HTTP.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

COMPLETIONS, CHAT, BATCH = "/v1/completions", "/v1/chat/completions", "/v1/chat/completions/batch"
RESPONSES, MESSAGES, GENERATE = "/v1/responses", "/v1/messages", "/inference/v1/generate"

_SAMPLING = frozenset(
    {
        *("add_special_tokens", "allowed_token_ids", "cache_salt", "ec_transfer_params", "echo"),
        *("frequency_penalty", "ignore_eos", "include_stop_str_in_output", "kv_transfer_params", "length_penalty"),
        *("logit_bias", "logprob_token_ids", "logprobs", "max_tokens", "min_p", "min_tokens", "mm_payload", "model"),
        *("n", "presence_penalty", "priority", "prompt_logprobs", "repetition_detection", "repetition_penalty"),
        *("request_id", "response_format", "return_mm_kwargs", "return_token_ids", "return_token_offsets"),
        *("return_tokens_as_token_ids", "routed_experts_prompt_start", "seed", "session_id", "skip_special_tokens"),
        *("spaces_between_special_tokens", "stop", "stop_token_ids", "stream", "stream_interval", "stream_options"),
        *("structured_outputs", "temperature", "thinking_token_budget", "top_k", "top_p", "truncate_prompt_tokens"),
        *("truncation_side", "use_beam_search", "user", "vllm_xargs", "watermarking"),
    }
)
_OF_CHATS = frozenset(
    {
        *("add_generation_prompt", "chat_template", "chat_template_kwargs", "continue_final_message", "documents"),
        *("include_reasoning", "max_completion_tokens", "media_io_kwargs", "messages", "mm_processor_kwargs"),
        *("parallel_tool_calls", "reasoning_effort", "return_prompt_text", "tool_choice", "tools", "top_logprobs"),
    }
)
OF_VLLM: Mapping[str, frozenset[str]] = {
    COMPLETIONS: _SAMPLING | {"prompt", "prompt_embeds", "suffix"},
    CHAT: _SAMPLING | _OF_CHATS,
    BATCH: _SAMPLING | _OF_CHATS | {"best_of", "early_stopping", "guided_decoding_backend"},
    RESPONSES: frozenset(
        {
            *("background", "cache_salt", "chat_template_kwargs", "ec_transfer_params", "enable_response_messages"),
            *("frequency_penalty", "ignore_eos", "include", "include_reasoning", "include_stop_str_in_output", "input"),
            *("instructions", "kv_transfer_params", "logit_bias", "max_output_tokens", "max_tool_calls", "metadata"),
            *("media_io_kwargs", "min_p", "mm_payload", "mm_processor_kwargs", "model", "parallel_tool_calls"),
            *("presence_penalty", "previous_input_messages", "previous_response_id", "priority", "prompt"),
            *("prompt_cache_key", "reasoning", "repetition_penalty", "request_id", "return_mm_kwargs", "seed"),
            *("service_tier", "session_id", "skip_special_tokens", "stop", "stop_token_ids", "store", "stream"),
            *("structured_outputs", "temperature", "text", "tool_choice", "tools", "top_k", "top_logprobs", "top_p"),
            *("truncation", "user", "vllm_xargs", "watermarking"),
        }
    ),
    MESSAGES: frozenset(
        {
            *("cache_salt", "chat_template_kwargs", "ec_transfer_params", "kv_transfer_params", "max_tokens"),
            *("messages", "metadata", "mm_payload", "model", "output_config", "return_mm_kwargs", "stop_sequences"),
            *("stream", "system", "temperature", "thinking", "tool_choice", "tools", "top_k", "top_p", "vllm_xargs"),
            "watermarking",
        }
    ),
    GENERATE: frozenset(
        {
            *("cache_salt", "content_parts", "ec_transfer_params", "features", "kv_transfer_params", "model"),
            *("output_mode", "priority", "reasoning_ended", "reasoning_parser_kwargs", "request_id"),
            *("return_token_ids", "sampling_params", "stream", "stream_options", "token_ids", "token_offsets"),
        }
    ),
}
"""The fields of vLLM 0.32's requests, without those that it takes and honours by half. A batch passes fields of single
chats on to them."""

SERVED = frozenset(
    {
        *("input_ids", "return_meta_info", "return_prompt_token_ids", "return_routed_experts"),
        *("routed_experts_start_len", "no_stop_trim", "regex", "ebnf", "json_schema", "lora_path", "extra_key"),
    }
)
"""SGLang's fields that completions and chat completions have here. `openai_request` says what they become."""

WITHOUT_EFFECT = frozenset(
    {
        *("custom_labels", "custom_params", "data_parallel_rank", "disagg_prefill_dp_rank", "guided_decoding_backend"),
        *("log_metrics", "metadata", "no_logs", "prediction", "prompt_cache_key", "prompt_cache_retention"),
        *("routed_dp_rank", "safety_identifier", "service_tier", "store", "stream_reasoning", "verbosity"),
    }
)
"""Accepted and ignored: they are about the caller, the server's work, or a model that is not here."""

_TEMPLATE = "give it in chat_template_kwargs, or as reasoning_effort"
_GUIDED = "vLLM has removed it; give structured_outputs or response_format"
_NOT_TOLD = "vLLM's answers do not have it"
_PICTURES = "give mm_processor_kwargs"
_NO_EQUIVALENT = "vLLM has no equivalent"
REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "audio": ((), _NO_EQUIVALENT),
    "bad_words": ((), "vLLM bans the spelling at the beginning of a text alone; give stop, or logit_bias with -100"),
    "beam_width": ((1,), "give n and temperature for several samples"),
    "best_of": ((1,), "give n and temperature for several samples"),
    "bootstrap_host": ((), _NO_EQUIVALENT),
    "bootstrap_port": ((), _NO_EQUIVALENT),
    "bootstrap_room": ((), _NO_EQUIVALENT),
    "custom_logit_processor": ((), "logit_bias changes the logits of single tokens"),
    "enable_thinking": ((), _TEMPLATE),
    "function_call": (("none",), "give tool_choice"),
    "functions": ((), "give tools"),
    "image_data": ((), "give image parts in messages"),
    "images_config": ((), _PICTURES),
    "logprob_start_len": ((-1,), "give prompt_logprobs"),
    "max_dynamic_patch": ((), _PICTURES),
    "max_new_tokens": ((), "give max_tokens"),
    "min_dynamic_patch": ((), _PICTURES),
    "min_new_tokens": ((0,), "give min_tokens"),
    "modalities": ((["text"],), _NO_EQUIVALENT),
    "prompt_token_ids": ((), "give input_ids"),
    "reasoning": ((), _TEMPLATE),
    "return_cached_tokens_details": ((), _NOT_TOLD),
    "return_entropy": ((), _NOT_TOLD),
    "return_flat_raw_output_top_logprobs": ((), _NOT_TOLD),
    "return_flat_raw_top_logprobs_b64": ((True,), _NOT_TOLD),
    "return_hidden_states": ((), _NOT_TOLD),
    "return_indexer_topk": ((), _NOT_TOLD),
    "return_input_ids_in_sglext": ((), "give return_prompt_token_ids"),
    "return_logprob": ((), "give logprobs"),
    "return_output_ids_in_sglext": ((), "give return_token_ids"),
    "return_sampling_mask": ((), _NOT_TOLD),
    "return_spec_tokens_details": ((), _NOT_TOLD),
    "return_text_in_logprobs": ((), "logprobs have texts unless return_tokens_as_token_ids is true"),
    "rid": ((), "/generate takes it; here /abort_request with abort_all ends a request, and so does closing it"),
    "sampling_logprobs_mode": (("selected",), _NOT_TOLD),
    "sampling_params": ((), "give its parameters as fields of the request"),
    "sampling_seed": ((), "give seed"),
    "separate_reasoning": ((True,), "vLLM's reasoning parser always takes thoughts apart"),
    "session_params": ((), _NO_EQUIVALENT),
    "stop_regex": ((), "name the texts in stop, or the tokens in stop_token_ids"),
    "structural_tag": ((), "give response_format or structured_outputs"),
    "task": ((), _NO_EQUIVALENT),
    "text": ((), "give prompt"),
    "thinking": ((), _TEMPLATE),
    "token_ids_logprob": ((), "give logprob_token_ids"),
    "top_logprobs_num": ((0,), "give top_logprobs at chats, logprobs at completions"),
    "use_audio_in_video": ((), _PICTURES),
    "video_config": ((), _PICTURES),
    "watermark": ((), "give watermarking"),
    "web_search_options": ((), _NO_EQUIVALENT),
} | {f"guided_{kind}": ((), _GUIDED) for kind in ("choice", "grammar", "json", "regex", "whitespace_pattern")}
"""Fields that change what is sampled, or ask for what no answer has: the values that mean nothing, besides null, false
and empty ones, and what a client can do."""
_NOTHING: tuple[Any, ...] = (None, False, "", [], {})


def reason_against(name: str, value: Any, path: str) -> str | None:
    """Why a request to `path` must not have this field, which vLLM would ignore; None if it may."""
    if is_one_of(value, _NOTHING) or name in OF_VLLM[path] or name in WITHOUT_EFFECT:
        return None
    if name in SERVED:
        return None if path in (COMPLETIONS, CHAT) else f"{name}: is not a field of {path}, which would ignore it"
    neutral, hint = REFUSED.get(name, ((), ""))
    if name in REFUSED:
        return None if is_one_of(value, neutral) else f"{name}: is not supported at {path}; {hint}"
    if path in (COMPLETIONS, CHAT, BATCH):
        return f"{name}: is not a field of vLLM's {path}, which would ignore it"
    return None


def is_one_of(value: Any, others: Collection[Any]) -> bool:
    """Whether the value equals one of these, with its type: `false` is not 0."""
    return any(type(value) is type(other) and value == other for other in others)
