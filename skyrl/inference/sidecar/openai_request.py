"""Requests to vLLM's routes that sample: fields that vLLM would ignore are refused, or become fields that it has.

vLLM ignores a field that it does not know, and samples as if the client had not sent it. So each field of SGLang's
dialect, of OpenAI's, and of earlier versions of vLLM is one of three: served, refused by name, or without an effect on
what is sampled. At completions and chat completions a field that is none of them is refused, too; so is one of vLLM's
that it honours by half.

`input_ids` is the prompt, also of a chat: vLLM does not render the messages then, and reads them only for what follows
the sample, such as tool calls. vLLM would ignore the ids where it must render, so such requests are refused. Knows no
HTTP."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from skyrl.inference.sidecar.call import boolean, integer, mapping, string, token_ids
from skyrl.inference.sidecar.errors import BadRequest

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


Fields = dict[str, msgspec.Raw]
INVOCATIONS = "/invocations"
_GRAMMARS = {"regex": "regex", "ebnf": "grammar", "json_schema": "json"}
_TEXT_PARTS = ("text", "input_text", "output_text", "refusal", "thinking")
_decode = msgspec.json.Decoder(Fields).decode


@dataclass(slots=True)
class OpenaiRequest:
    """`body` is what vLLM gets. `tokens`: the prompt, if the client gave its ids to a chat. `given_tokens`: how many
    ids the client gave. `meta_info`: each choice of the answer has it, with logprobs if `logprobs`. `keeps_ids`: the
    client asked vLLM for the token ids."""

    path: str
    body: bytes
    tokens: list[int] | None = None
    given_tokens: int = 0
    meta_info: bool = False
    prompt_ids: bool = False
    logprobs: bool = False
    keeps_ids: bool = False
    stream: bool = False
    routed_experts_start: int | None = None

    @property
    def is_plain(self) -> bool:
        """vLLM's answer goes to the client as it comes."""
        return self.tokens is None and not self.meta_info and not self.prompt_ids


def read_openai(path: str, body: bytes) -> OpenaiRequest:
    """Raises BadRequest, with the name of the field. What is no JSON object is vLLM's to refuse."""
    fields = _fields(body)
    if fields is None:
        return OpenaiRequest(path, body)
    if path == INVOCATIONS:  # vLLM takes several kinds of request there
        path = CHAT if bytes(fields.get("messages", b"null")) != b"null" else COMPLETIONS
        if path == COMPLETIONS and not fields.keys() & {"prompt", "prompt_embeds"}:
            return OpenaiRequest(path, body)
    if path not in OF_VLLM:
        return OpenaiRequest(path, body)
    given: dict[str, Any] = {}
    for name in (name for name in fields if name not in OF_VLLM[path]):
        given[name] = _value(name, fields[name])
        if (reason := reason_against(name, given[name], path)) is not None:
            raise BadRequest(reason)
    given = {name: value for name, value in given.items() if name in SERVED and value is not None}
    return _Served(path, body, fields, given).request() if given else OpenaiRequest(path, body)


def _fields(body: bytes) -> Fields | None:
    """Undecoded. None for what is no JSON object. vLLM reads some JSON that is not strict."""
    try:
        return _decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    return {name: msgspec.Raw(json.dumps(value).encode()) for name, value in found.items()}


def _value(name: str, raw: msgspec.Raw) -> Any:
    """Raises BadRequest."""
    try:
        return json.loads(bytes(raw))
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"{name}: cannot be read: {error}") from error


class _Served:
    """One request with fields of SGLang's. `given`: those, decoded."""

    def __init__(self, path: str, body: bytes, fields: Fields, given: dict[str, Any]) -> None:
        self._path = path
        self._body = body
        self._fields = {name: raw for name, raw in fields.items() if name in OF_VLLM[path]}
        self._given = given

    def request(self) -> OpenaiRequest:
        """Raises BadRequest."""
        stream = self._of_vllm("stream") is True
        made = OpenaiRequest(self._path, self._body, stream=stream)
        made.keeps_ids = self._of_vllm("return_token_ids") is True
        made.logprobs = not is_one_of(self._of_vllm("logprobs"), (None, False))  # 0 asks for those of the tokens
        made.meta_info = self._flag("return_meta_info")
        made.prompt_ids = self._flag("return_prompt_token_ids")
        self._set_grammar()
        if adapter := self._given.get("lora_path"):  # SGLang's clients name the base model in `model`
            self._fields["model"] = msgspec.Raw(msgspec.json.encode(string("lora_path", adapter)))
        if self._flag("no_stop_trim"):
            self._set("include_stop_str_in_output", True, "no_stop_trim")
        if salt := self._given.get("extra_key"):
            self._set("cache_salt", string("extra_key", salt), "extra_key")
        made.routed_experts_start = self._routed_experts_start(made.meta_info)
        ids = self._prompt()
        made.given_tokens = len(ids)
        made.tokens = ids if ids and self._path == CHAT else None
        self._check_answer(made)
        if not made.is_plain:
            self._fields["return_token_ids"] = msgspec.Raw(b"true")
        made.body = msgspec.json.encode(self._fields)
        return made

    def _of_vllm(self, name: str) -> Any:
        raw = self._fields.get(name)
        return None if raw is None else _value(name, raw)

    def _flag(self, name: str) -> bool:
        return boolean(name, self._given.get(name, False))

    def _set(self, theirs: str, value: Any, ours: str) -> None:
        """Raises BadRequest if the client gave vLLM's field another value."""
        if self._of_vllm(theirs) not in (None, False, value):
            raise BadRequest(f"{ours}: {theirs} has another value")
        self._fields[theirs] = msgspec.Raw(json.dumps(value).encode())  # msgspec refuses half of a surrogate pair

    def _set_grammar(self) -> None:
        given = [name for name in _GRAMMARS if self._given.get(name)]
        if not given:
            return
        beside = [name for name in ("structured_outputs", "response_format") if self._of_vllm(name) is not None]
        if others := given[1:] + beside:
            raise BadRequest(f"{given[0]}: cannot be combined with {others[0]}")
        value = self._given[given[0]]
        if given[0] != "json_schema" or not isinstance(value, dict):
            value = string(given[0], value)
        self._set("structured_outputs", {_GRAMMARS[given[0]]: value}, given[0])

    def _routed_experts_start(self, meta_info: bool) -> int | None:
        start = integer("routed_experts_start_len", self._given.get("routed_experts_start_len", 0), 0)
        if not self._flag("return_routed_experts"):
            return None
        if not meta_info:
            raise BadRequest("return_routed_experts: needs return_meta_info, where they are answered")
        self._set("routed_experts_prompt_start", start, "routed_experts_start_len")
        return start

    def _prompt(self) -> list[int]:
        """The ids that the client gave; none if it gave a text or messages."""
        if (given := self._given.get("input_ids")) is None:
            return []
        ids = token_ids("input_ids", given)
        if self._path == COMPLETIONS:
            if beside := next((name for name in ("prompt", "prompt_embeds") if self._of_vllm(name) is not None), None):
                raise BadRequest(f"input_ids: cannot be combined with {beside}")
            self._fields["prompt"] = msgspec.Raw(msgspec.json.encode(ids))
            return ids
        for name in ("echo", "truncate_prompt_tokens"):
            if self._of_vllm(name) not in (None, False):
                raise BadRequest(f"{name}: cannot be combined with input_ids")
        if (kind := _other_than_text(self._of_vllm("messages"))) is not None:
            raise BadRequest(f"input_ids: cannot be combined with parts of the type {kind!r} in messages")
        transfer = self._of_vllm("kv_transfer_params")
        transfer = {} if transfer is None else mapping("kv_transfer_params", transfer)
        if transfer.get("prompt_token_ids") not in (None, ids):
            raise BadRequest("input_ids: kv_transfer_params.prompt_token_ids has another value")
        self._fields["kv_transfer_params"] = msgspec.Raw(msgspec.json.encode(transfer | {"prompt_token_ids": ids}))
        return ids

    def _check_answer(self, made: OpenaiRequest) -> None:
        """Raises BadRequest where vLLM's answer would not have what the client asks for."""
        for name, asked in (("return_meta_info", made.meta_info), ("return_prompt_token_ids", made.prompt_ids)):
            if asked and made.stream:
                raise BadRequest(f"{name}: is not supported in a stream; set stream to false")
        if not made.meta_info:
            return
        for name in ("echo", "use_beam_search"):
            if self._of_vllm(name) not in (None, False):
                raise BadRequest(f"{name}: cannot be combined with return_meta_info")
        if self._of_vllm("include_reasoning") is False:
            raise BadRequest("include_reasoning: must be true with return_meta_info: vLLM hides the tokens otherwise")


def _other_than_text(messages: Any) -> str | None:
    """The type of a part that is no text; vLLM would render such messages, and ignore the ids."""
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else ():
            if isinstance(part, dict) and (kind := part.get("type", "text")) not in _TEXT_PARTS:
                return str(kind)
    return None
