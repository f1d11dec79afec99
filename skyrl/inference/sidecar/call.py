"""One HTTP request to the sidecar: its body, its parameters and fields, and its answer. Knows no routes.

A function that reads a single field raises BadRequest, with the field's name, for a wrong value. The parameters of the
sidecar's own routes are fields of the JSON body, or of the query. Both count, because a parameter that is not read
would change nothing and be answered as if it had. A query parameter that its route does not have is refused. A field of
the body that a route does not have is ignored, as in SGLang: newer clients send more."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import parse_qs

from skyrl.http.connection import HeaderList
from skyrl.http.messages import Body, BodyTooLarge, Receive, Reply, Scope, Send, WatchedSend, json_reply
from skyrl.inference.sidecar.errors import BadRequest, SidecarError, TooLarge

INT64_MAX = 2**63 - 1


def integer(name: str, value: Any, low: int, high: int = INT64_MAX) -> int:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadRequest(f"{name}: must be an integer, got {_shown(value)}")
    if not low <= value <= high:
        raise BadRequest(f"{name}: must be {_range(low, high)}, got {value}")
    return value


def number(name: str, value: Any, low: float, high: float = math.inf, *, above: bool = False) -> float:
    """With `above`, the value must be greater than `low`."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
        raise BadRequest(f"{name}: must be a number, got {_shown(value)}")
    if value < low or value > high or (above and value == low):
        lower = f"greater than {low:g}" if above else f"at least {low:g}"
        upper = "" if high == math.inf else f" and at most {high:g}"
        raise BadRequest(f"{name}: must be {lower}{upper}, got {value:g}")
    return value


def boolean(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise BadRequest(f"{name}: must be true or false, got {_shown(value)}")
    return value


def string(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise BadRequest(f"{name}: must be a string, got {_shown(value)}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise BadRequest(f"{name}: has half of a surrogate pair") from None
    return value


def token_ids(name: str, value: Any) -> list[int]:
    """A list of token ids that is not empty. Checked in one pass: prompts have thousands of tokens."""
    if not isinstance(value, list) or not value:
        raise BadRequest(f"{name}: must be a list of token ids that is not empty")
    for token in value:
        if type(token) is not int or not 0 <= token <= INT64_MAX:
            raise BadRequest(f"{name}: {_shown(token)} is not a token id")
    return value


def mapping(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BadRequest(f"{name}: must be an object, got {_shown(value)}")
    return value


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


def _range(low: int, high: int) -> str:
    return f"at least {low}" if high >= INT64_MAX else f"between {low} and {high}"


PLAIN: HeaderList = [(b"content-type", b"text/plain; charset=utf-8")]
EVENTS: HeaderList = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


class Call:
    """One request. `send.status` is the status that has been sent, after which no error can be answered any more."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, max_body_bytes: int) -> None:
        self.scope = scope
        self.receive = receive
        self.send = WatchedSend(send)
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.query: bytes = scope.get("query_string", b"")
        self.body = Body(receive, max_body_bytes)
        self._max = max_body_bytes

    async def whole_body(self) -> bytes:
        """Raises TooLarge, ClientLeft."""
        try:
            return await self.body.collect()
        except BodyTooLarge as error:
            raise TooLarge(f"body: may have {self._max} bytes") from error


def error_reply(error: SidecarError) -> Reply:
    return json_reply(error.status, error_body(error), _error_headers(error))


def failure_reply(error: SidecarError, status: int) -> Reply:
    """As `error_reply`, with SGLang's two fields of a failed change, and the outcome of each rank."""
    ranks = {} if error.rank_results is None else {"rank_results": error.rank_results}
    body = {"success": False, "message": error.message} | ranks | error_body(error)
    return json_reply(status, body, _error_headers(error))


def _error_headers(error: SidecarError) -> HeaderList:
    if error.status == 401:
        return [(b"www-authenticate", b"Bearer")]
    return [] if error.retry_after_s is None else [(b"retry-after", str(error.retry_after_s).encode())]


def error_body(error: SidecarError) -> dict[str, Any]:
    return {"error": {"message": error.message} | ({} if error.code is None else {"code": error.code})}


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
    given, readers = _in_body(await call.whole_body()), QUERIES[call.path]
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
