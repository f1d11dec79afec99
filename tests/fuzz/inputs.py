"""Nearly valid bodies: a valid body of a route with some values replaced, and then some bytes changed."""

from __future__ import annotations

import json
from typing import Any, cast

import zstandard
from hypothesis import strategies as st

from skyrl.base.wire import tinker_pb2 as pb
from tests.contract.strangers import LISTS, TRIED

PASS: dict[str, Any] = {
    "data": [
        {
            "model_input": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
            "loss_fn_inputs": {
                "target_tokens": {"data": [2, 3, 4], "dtype": "int64", "shape": [3]},
                "weights": {"data": [1.0, 1.0, 0.0], "dtype": "float32", "shape": [3]},
            },
        }
    ],
    "loss_fn": "cross_entropy",
}
SAVE: dict[str, Any] = {"model_id": "{their_model}", "seq_id": 5, "path": "x", "ttl_seconds": 3600, "overwrite": True}
FULL: dict[str, dict[str, Any]] = {
    "create_session": {"tags": ["a"], "user_metadata": {"a": {"b": [1]}}, "project_id": "p", "display_name": "n"},
    "session_heartbeat": {"session_id": "{session}"},
    "sessions/{their_session}/finish": {"reason": {"type": "success"}, "detail": "d"},
    "sessions/search": {
        "session_id": "{session}",
        "project_ids": ["p"],
        "user_metadata": {"note": "mine"},
        "display_name": "mine",
        "owner": {"type": "user", "owner_urns": ["tml:user:x"]},
        "statuses": [{"type": "client_finished", "reasons": ["success"]}],
        "limit": 5,
        "cursor": {"last_created_at": "2026-01-01T00:00:00Z", "last_session_id": "{session}"},
    },
    "checkpoints/search": {
        "project_ids": ["p"],
        "user_metadata": {"note": "mine"},
        "checkpoint_type": "training",
        "owner": {"type": "user", "owner_urns": ["tml:user:x"]},
        "base_models": ["tiny"],
        "limit": 5,
        "cursor": {"last_created_at": "2026-01-01T00:00:00Z", "last_checkpoint_uuid": "7"},
    },
    "create_model": {
        "session_id": "{their_session}",
        "model_seq_id": 1,
        "base_model": "tiny",
        "lora_config": {"rank": 2, "seed": 1},
        "optimizer_config": {"type": "adamw"},
        "user_metadata": {"a": 1},
    },
    "get_info": {"model_id": "{model}"},
    "unload_model": {"model_id": "{their_model}"},
    "optim_step": {"model_id": "{their_model}", "seq_id": 3, "adam_params": {"learning_rate": 1e-4}},
    "forward_backward": {"model_id": "{their_model}", "seq_id": 3, "forward_backward_input": PASS},
    "save_weights": SAVE,
    "save_weights_for_sampler": SAVE | {"sampling_session_seq_id": 1},
    "save_weights_external": SAVE | {"age_encryption_recipients": ["age1x"]},
    "load_weights": {"path": "{path}", "session_id": "{session}", "model_seq_id": -1, "weights_access_token": "tml-x"},
    "load_weights?into=model": {"model_id": "{their_model}", "seq_id": 5, "path": "{path}", "optimizer": True},
    "weights_info": {"tinker_path": "{path}"},
    "copy_weights": {"source_path": "{their_path}", "destination_project_id": "p", "weights_access_token": "tml-x"},
    "external_weights_upload_start": {
        "base_model": "tiny",
        "lora_config": {"rank": 2, "seed": 1},
        "destination_project_id": "p",
    },
    "external_weights_upload_finish": {"upload_id": "0123"},
    "create_sampling_session": {"session_id": "{session}", "sampling_session_seq_id": 0, "model_path": "{path}"},
    "join_sampling_session": {"sampling_session_id": "{sampler}"},
    "asample": {
        "sampling_session_id": "{sampler}",
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
        "sampling_params": {"max_tokens": 4, "seed": 1, "stop": ["a"], "temperature": 1.0, "top_k": 2, "top_p": 0.5},
        "num_samples": 1,
        "prompt_logprobs": True,
        "topk_prompt_logprobs": 1,
        "target_prompt_logprobs": {"data": [1, 2], "dtype": "int64", "shape": [2, 1]},
    },
    "retrieve_future": {"request_id": "nobody", "allow_metadata_only": True},
    "retrieve_futures": {
        "target": {"sampling_session_id": "{sampler}", "type": "sampling_session", "cloned_sampler_id": 0},
        "prev_cursor": 0,
        "timeout": 0,
        "retrieved_request_ids": ["x"],
    },
    "cancel_future": {"request_id": "nobody"},
    "/v1/completions": {
        "model": "{sampler_path}",
        "prompt": [[1, 2, 3], [4]],
        "max_tokens": 2,
        "n": 2,
        "stop": ["a"],
        "stop_token_ids": [5],
        "seed": 1,
        "logit_bias": {"7": -1.5},
        "allowed_token_ids": [5, 6, 7],
        "logprobs": 1,
        "prompt_logprobs": 1,
        "response_format": {"type": "text"},
        "user": "u",
    },
    "/inference/v1/generate": {
        "model": "{sampler_path}",
        "token_ids": [1, 2, 3],
        "sampling_params": {"max_tokens": 2, "n": 2, "logprobs": 1, "stop_token_ids": [5], "logit_bias": {"7": -1.5}},
        "output_mode": "text",
        "return_token_ids": True,
    },
    "/v1/chat/completions": {
        "model": "tiny",
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {"role": "assistant", "content": "b", "refusal": None},
            {"role": "user", "content": "c"},
        ],
        "max_completion_tokens": 2,
        "logprobs": True,
        "top_logprobs": 1,
        "stream": True,
        "stream_options": {"include_usage": True},
        "structured_outputs": {"choice": ["a", "b"]},
        "chat_template_kwargs": {"enable_thinking": False},
    },
    "agent_sessions": {
        "model": "tiny",
        "name": "n",
        "follows": "newest",
        "limits": {"turns": 5, "tokens": 1000, "seconds": 60.0, "idle_s": 9.5},
        "sampling": {"temperature": 0.5, "max_tokens": 4, "stop": ["a"]},
        "metadata": {"a": {"b": [1]}},
        "keep_thinking": True,
        "routed_experts": False,
    },
    "/v1/messages": {
        "model": "tiny",
        "max_tokens": 2,
        "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "b"}]},
        ],
        "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "auto"},
        "stop_sequences": ["a"],
        "temperature": 1.0,
        "top_k": 2,
        "top_p": 0.5,
        "stream": True,
        "metadata": {"user_id": "u"},
    },
    "/v1/responses": {
        "model": "tiny",
        "instructions": "s",
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {"type": "function_call", "call_id": "t", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "t", "output": "b"},
        ],
        "tools": [{"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}}],
        "tool_choice": "auto",
        "max_output_tokens": 2,
        "temperature": 1.0,
        "top_p": 0.5,
        "stream": True,
        "store": True,
        "metadata": {"a": "b"},
    },
}
"""Bodies of POST routes with all their fields. If a route has two bodies, a query tells them apart; no route reads it.
Bodies that would end or fill a session name the other tenant's session, so that the first tenant's stays usable."""
_THEIRS = {"session_id": "their_session", "my_session": "session", "model_id": "their_model"}
_THEIRS |= {"sampler_id": "their_sampler", "path": "their_path"}


def _from_strangers() -> dict[str, dict[str, Any]]:
    """A body for each POST route with a body, taken from the requests of `test_isolation`."""
    found: dict[str, dict[str, Any]] = {}
    for (method, path), tries in (TRIED | LISTS).items():
        if method == "POST" and not path.endswith("/publish"):
            text = json.dumps([path.removeprefix("/api/v1/"), tries[0].body])
            for name, their_name in _THEIRS.items():
                text = text.replace("{" + name + "}", "{" + their_name + "}")
            route, body = json.loads(text)
            found[route] = body
    return found


GOOD = _from_strangers() | FULL
"""A valid body of every POST route with a body. A route without a slash at its beginning is below /api/v1."""


def path_of(route: str) -> str:
    return route if route.startswith("/") else f"/api/v1/{route}"


NESTED = 20_000
STRINGS = (
    "",
    "a" * 100_000,
    "../../../../etc/passwd",
    "tinker://../weights/..",
    "tinker://{model}/weights/%2e%2e",
    "tinker:///weights/x",
    "tinker://{their_model}/weights/saved",
    "{their_session}",
    "{their_model}",
    "{their_sampler}",
    "{model}",
    "%00",
    "a\0b",
    "' OR 1=1 --",
    "\u202e\U0001f4a5\uffff",
    "eyJ.eyJ.x",
    "NaN",
)
FRAGMENTS = (
    *(json.dumps(text).encode() for text in STRINGS),
    *(json.dumps(number).encode() for number in (0, -1, 1, 2**31, 2**63 - 1, 2**63, 2**64, -(2**63) - 1, 10**30, 0.5)),
    *(b"null", b"true", b"[]", b"{}", b"[[]]", b'{"":{"":0}}', b"-0.0", b"1e308", b"1e-400", b"1000000", b"10000000"),
    *(b"NaN", b"Infinity", b"-Infinity", b"1e999", b"9" * 5000, b"01", b"'x'", b'"\xff"', b'"\\ud800"', b'"\\ud800x"'),
    *(b"[" * NESTED + b"]" * NESTED, b'{"a":' * 900 + b"1" + b"}" * 900, b"[" * NESTED, b"[" + b"1," * 50_000 + b"1]"),
)
"""JSON texts, and texts that only look like JSON."""
_HOLE = "\x01hole\x01"


def _places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of keys and indices to every part of `value`, including `value` itself."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at, *(place for key, item in inside for place in _places(item, (*at, key)))]


def _replaced(value: Any, at: tuple[Any, ...], to: Any) -> Any:
    if not at:
        return to
    copy = value.copy()
    copy[at[0]] = _replaced(value[at[0]], at[1:], to)
    return copy


@st.composite
def json_bodies(draw: st.DrawFn, good: dict[str, Any]) -> bytes:
    """`good` with one to three values replaced, and perhaps with a repeated key or an unknown field."""
    body: Any = good
    fragments: list[bytes] = []
    for _ in range(draw(st.integers(1, 3))):
        body = _replaced(body, draw(st.sampled_from(_places(body))), _HOLE)
        fragments.append(draw(st.sampled_from(FRAGMENTS)))
        if body == _HOLE:
            break
    text = json.dumps(body).encode()
    for fragment in fragments:
        text = text.replace(json.dumps(_HOLE).encode(), fragment, 1)
    odd = draw(st.sampled_from([*GOOD["asample"], *good, "x", "weights_access_token", "source_tenant", "\0"]))
    if text.startswith(b"{") and draw(st.booleans()):
        key = json.dumps(odd).encode() if draw(st.integers(0, 3)) else b'"\xff"'
        extra = key + b":" + draw(st.sampled_from(FRAGMENTS))
        text = text[:-1] + (b"," if len(text) > 2 else b"") + extra + b"}"
    return text


@st.composite
def damaged(draw: st.DrawFn, body: bytes) -> bytes:
    """`body`, usually with a cut, a changed byte, inserted bytes, or repeated."""
    how = draw(st.sampled_from(["not", "not", "cut", "flip", "insert", "repeat"]))
    at = draw(st.integers(0, max(0, len(body) - 1)))
    if how == "cut":
        return body[:at]
    if how == "flip":
        return body[:at] + bytes([draw(st.integers(0, 255))]) + body[at + 1 :]
    if how == "insert":
        return body[:at] + draw(st.binary(min_size=1, max_size=8)) + body[at:]
    return body * 2 if how == "repeat" else body


@st.composite
def encoded(draw: st.DrawFn, body: bytes) -> tuple[bytes, dict[str, str]]:
    """The bytes of a body and its headers: plain, compressed, or with a wrong Content-Encoding."""
    how = draw(st.sampled_from(["plain", "plain", "zstd", "damaged", "twice", "not zstd", "gzip"]))
    if how == "plain":
        return body, {}
    if how == "zstd":
        return zstandard.compress(body), {"Content-Encoding": "zstd"}
    if how == "damaged":
        return draw(damaged(zstandard.compress(body))), {"Content-Encoding": "zstd"}
    if how == "twice":
        return zstandard.compress(zstandard.compress(body)), {"Content-Encoding": "zstd"}
    return body, {
        "Content-Encoding": "zstd" if how == "not zstd" else draw(st.sampled_from(["gzip", "br", "zstd, zstd"]))
    }


SIDES = st.sampled_from([0, 1, 2, 3, -1, 2**20, 2**28, 2**31, 2**40, 2**62, 2**63 - 1, -(2**63)])
RAW = st.one_of(
    st.binary(max_size=40),
    st.sampled_from(
        [
            b"\x00\x00\xc0\x7f" * 3,  # NaN
            b"\x00\x00\x80\x7f" * 3,  # infinity
            b"\xff\xff\x7f\x7f" * 3,  # the largest float32
            b"\xff" * 12,
            b"\x01\0\0\0" * 3,
            b"\x02\0\0\0\0\0\0\0" * 3,
            b"\0" * 12,
            b"\0" * 24,
        ]
    ),
)
NAMES = st.one_of(
    st.sampled_from(
        [
            "target_tokens",
            "weights",
            "logprobs",
            "advantages",
            "clip_low_threshold",
            "clip_high_threshold",
            "mask",
            "",
            "a\0b",
            "../x",
            "t" * 10_000,
        ]
    ),
    st.text(st.characters(codec="utf-8"), max_size=5),
)
LOSSES = st.sampled_from(
    ["cross_entropy", "importance_sampling", "ppo", "cispo", "dppo", "dppo_kl", "dro", "", "nobody's", "a\0b"]
)
NUMBERS = st.floats(allow_nan=True, allow_infinity=True)


@st.composite
def tensors(draw: st.DrawFn) -> pb.Tensor:
    dtype = cast(pb.DType, draw(st.sampled_from([0, 1, 2, 3, 4, 77])))
    tensor = pb.Tensor(dtype=dtype, shape=draw(st.lists(SIDES, max_size=3)))
    if draw(st.booleans()):
        tensor.dense = draw(RAW)
    else:
        tensor.sparse_csr.values, tensor.sparse_csr.crow_indices = draw(RAW), draw(RAW)
        tensor.sparse_csr.col_indices = draw(RAW)
    return tensor


@st.composite
def datums(draw: st.DrawFn) -> pb.Datum:
    datum = pb.Datum()
    for raw in draw(st.lists(RAW, max_size=2)):
        chunk = datum.model_input.add()
        kind = draw(st.sampled_from(["text", "text", "text", "image", "dmel", "none"]))
        if kind == "text":
            chunk.encoded_text.tokens = raw
        elif kind == "image":
            chunk.image.data = raw
        elif kind == "dmel":
            chunk.dmel.dmel = raw
    for name in draw(st.lists(NAMES, max_size=3)):
        datum.loss_fn_inputs[name].CopyFrom(draw(tensors()))
    return datum


@st.composite
def passes(draw: st.DrawFn) -> pb.ForwardBackwardRequest:
    """A pass without model and number."""
    message = pb.ForwardBackwardRequest(loss_fn=draw(LOSSES), forward_only=draw(st.booleans()))
    message.data.extend(draw(st.lists(datums(), max_size=3)))
    for name in draw(st.lists(NAMES, max_size=2)):
        message.loss_fn_config[name] = draw(NUMBERS)
        if draw(st.booleans()):
            message.loss_fn_config_v2[name].text = "x"
    return message
