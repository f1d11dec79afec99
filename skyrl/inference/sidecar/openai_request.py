"""Requests to vLLM's routes that sample: fields that vLLM would ignore are refused, or become fields that it has.

`input_ids` is the prompt, also of a chat: vLLM does not render the messages then, and reads them only for what follows
the sample, such as tool calls. vLLM would ignore the ids where it must render, so such requests are refused.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import msgspec

from skyrl.inference.sidecar.errors import BadRequest
from skyrl.inference.sidecar.fields import boolean, integer, mapping, string, token_ids
from skyrl.inference.sidecar.openai_fields import CHAT, COMPLETIONS, OF_VLLM, SERVED, is_one_of, reason_against

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
        self._set_adapter()
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
        self._fields[theirs] = msgspec.Raw(msgspec.json.encode(value))

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

    def _set_adapter(self) -> None:
        """The adapter's name stands in `model` for vLLM; SGLang's clients name the base model there."""
        if adapter := self._given.get("lora_path"):
            self._fields["model"] = msgspec.Raw(msgspec.json.encode(string("lora_path", adapter)))

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
