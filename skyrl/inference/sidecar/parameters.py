"""The parameters of the sidecar's own routes: fields of the JSON body, or of the query.

Both count, because a parameter that is not read would change nothing and be answered as if it had. A query parameter
that its route does not have is refused. A field of the body that a route does not have is ignored, as in SGLang: newer
clients send more. Knows no meanings; the routes check the values.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import parse_qs

from skyrl.inference.sidecar.call import Call
from skyrl.inference.sidecar.errors import BadRequest
from skyrl.inference.sidecar.fields import mapping

Read = Callable[[str, list[str]], Any]
_FLAGS = {"true": True, "1": True, "false": False, "0": False}


def _text(name: str, given: list[str]) -> str:
    if len(set(given)) > 1:
        raise BadRequest(f"{name}: has several values in the query")
    return given[0]


def _flag(name: str, given: list[str]) -> bool:
    value = _FLAGS.get(_text(name, given).lower())
    if value is None:
        raise BadRequest(f"{name}: must be true or false, got {given[0]!r}")
    return value


def _number(name: str, given: list[str]) -> int | float:
    text = _text(name, given)
    try:
        return int(text) if text.lstrip("+-").isdecimal() else float(text)
    except ValueError:
        raise BadRequest(f"{name}: must be a number, got {text!r}") from None


def _texts(name: str, given: list[str]) -> list[str]:
    return given


_CHANGE: Mapping[str, Read] = {
    "weight_version": _text,
    "load_format": _text,
    "selector": _text,
    "flush_cache": _flag,
    "abort_all_requests": _flag,
    "keep_pause": _flag,
    "partial": _flag,
    "torch_empty_cache": _flag,
}
QUERIES: Mapping[str, Mapping[str, Read]] = {
    "/abort_request": {"rid": _text, "abort_all": _flag},
    "/flush_cache": {"timeout": _number},
    "/pause_generation": {"mode": _text},
    "/continue_generation": {"torch_empty_cache": _flag},
    "/update_weights_from_disk": _CHANGE
    | {"model_path": _text, "base": _text, "stage_only": _flag, "keep": _flag}
    | {"is_async": _flag, "recapture_cuda_graph": _flag, "token_step": _number},
    "/update_weights_from_distributed": _CHANGE | {"group_name": _text},
    "/update_weights_from_tensor": _CHANGE | {"update": _text, "stage_only": _flag, "discard": _flag},
    "/init_weights_update_group": {
        **dict.fromkeys(("master_address", "master_port", "group_name", "backend"), _text),
        **dict.fromkeys(("rank_offset", "world_size", "timeout_s"), _number),
    },
    "/destroy_weights_update_group": {"group_name": _text},
    "/update_weight_version": {"new_version": _text, "abort_all_requests": _flag},
    "/get_weights_by_name": {"name": _text, "truncate_size": _number},
    "/weights_checker": {"action": _text, "selector": _text, "skip_tensor_list": _texts, "allow_quant_error": _flag},
    "/release_memory_occupation": {"tags": _texts},
    "/resume_memory_occupation": {"tags": _texts},
    "/load_lora_adapter": {"lora_name": _text, "lora_path": _text, "pinned": _flag},
    "/unload_lora_adapter": {"lora_name": _text},
}
"""What each route reads in its query. Lists of tensors are in the body alone."""


async def parameters(call: Call) -> dict[str, Any]:
    """The parameters of a route of `QUERIES`. Raises BadRequest for one that the query has and the route has not, and
    for one that has two values; TooLarge, ClientLeft."""
    given, readers = _in_body(await call.body()), QUERIES[call.path]
    for name, values in parse_qs(call.query.decode("latin-1"), keep_blank_values=True).items():
        if name not in readers:
            raise BadRequest(f"{name}: {call.path} has no such parameter in its query")
        value = readers[name](name, values)
        if given.get(name) not in (None, value):
            raise BadRequest(f"{name}: is {value!r} in the query and {given[name]!r} in the body")
        given[name] = value
    return given


def _in_body(body: bytes) -> dict[str, Any]:
    """The JSON object; an empty body is an empty object."""
    try:
        return mapping("body", json.loads(body) if body.strip() else {})
    except ValueError as error:
        raise BadRequest(f"body: is not JSON: {error}") from error
    except RecursionError as error:
        raise BadRequest("body: is nested too deeply") from error
