"""SGLang's requests for new weights, read and checked. Each function raises BadRequest, which names the field."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from skyrl.inference.sidecar.call import boolean, integer, mapping, number, string
from skyrl.inference.sidecar.errors import BadRequest

DEFAULT_GROUP = "weight_update_group"
LOAD_FORMATS = (None, "auto", "safetensors")
MAX_RANKS = 1 << 20


Arguments = dict[str, Any]
"""Of a call to the workers."""


@dataclass(frozen=True, slots=True)
class Change:
    """What all kinds of update have. `version` None: the version of before goes up. `partial`: not all tensors are
    sent. `stage_only`: read and check now, and apply when the same request comes without this field."""

    version: str | None
    flush_cache: bool
    abort_all: bool
    keep_pause: bool
    partial: bool
    stage_only: bool
    checksums: dict[str, str] | None


def from_disk(given: dict[str, Any]) -> tuple[Arguments, Change]:
    """`keep`: the version's bytes stay in memory, so that it can be the `base` of a later one. `base`: the files have
    what differs from it."""
    load_format = given.get("load_format")
    if load_format not in LOAD_FORMATS:
        raise BadRequest(f"load_format: {load_format!r} is not offered; the files must be safetensors")
    path = string("model_path", given.get("model_path"))
    if not path.startswith("/"):
        raise BadRequest(f"model_path: {path!r} is not an absolute path on the worker's machine")
    change, base = _change(given), given.get("base")
    arguments = {
        "directory": path,
        "version": change.version,
        "checksums": change.checksums,
        "partial": change.partial,
        "keep": _flag(given, "keep", default=False),
        "base": None if base is None else string("base", base),
    }
    return arguments, change


def from_group(given: dict[str, Any]) -> tuple[Arguments, Change]:
    """One bucket."""
    tensors, change = _tensors(given), _change(given, stages=False)
    if not tensors["names"]:
        raise BadRequest("names: must be a list of names that is not empty")
    group = string("group_name", given.get("group_name") or DEFAULT_GROUP)
    return {"group": group, **tensors, "version": change.version, "checksums": change.checksums}, change


def from_memory(given: dict[str, Any]) -> tuple[Arguments, Change]:
    """Tensors in memory of a trainer on this machine; without `memory` in the arguments, none. `stage_only`: others
    follow. `update`: the trainer's name for the update, of which these are a part."""
    change, update = _change(given), given.get("update")
    arguments = {"version": change.version, "update": None if update is None else string("update", update)}
    if given.get("memory") is None:
        _check_each_by_name(given)
        return arguments, change
    tensors, places = _tensors(given), given.get("places")
    if not isinstance(places, list) or len(places) != len(tensors["names"]):
        raise BadRequest("places: must be a list of integers, one for each name")
    arguments |= {
        "places": [integer("places", place, 0) for place in places],
        "memory": mapping("memory", given["memory"]),
        "checksums": change.checksums,
    }
    return arguments | tensors, change


def _check_each_by_name(given: dict[str, Any]) -> None:
    """Raises BadRequest for SGLang's formats of several tensors in one."""
    load_format = given.get("load_format")
    if load_format is not None:
        raise BadRequest(f"load_format: {load_format!r} is not offered: each tensor is sent under its own name")


def _tensors(given: dict[str, Any]) -> Arguments:
    """Names, dtypes and shapes, as many of each."""
    _check_each_by_name(given)
    names, dtypes = (_strings(field, given.get(field)) for field in ("names", "dtypes"))
    shapes = given.get("shapes")
    if not isinstance(shapes, list) or not all(isinstance(shape, list) for shape in shapes):
        raise BadRequest("shapes: must be a list of lists of integers")
    sizes = [[integer("shapes", size, 0) for size in shape] for shape in shapes]
    if not len(names) == len(dtypes) == len(sizes):
        raise BadRequest(f"names, dtypes, shapes: have {len(names)}, {len(dtypes)} and {len(sizes)} entries")
    return {"names": names, "dtypes": dtypes, "shapes": sizes}


def new_group(given: dict[str, Any]) -> Arguments:
    """`timeout_s` bounds the forming, and each broadcast later; None if the trainer does not say it."""
    port = given.get("master_port")
    if isinstance(port, str) and port.isdigit():  # one of the clients sends it so
        port = int(port)
    backend = string("backend", given.get("backend") or "nccl")
    if backend not in ("nccl", "gloo"):
        raise BadRequest(f"backend: {backend!r} is not one of nccl, gloo")
    timeout_s = given.get("timeout_s")
    return {
        "address": string("master_address", given.get("master_address")),
        "port": integer("master_port", port, 1, 65535),
        "rank_offset": integer("rank_offset", given.get("rank_offset"), 1, MAX_RANKS),
        "world_size": integer("world_size", given.get("world_size"), 2, MAX_RANKS),
        "name": string("group_name", given.get("group_name") or DEFAULT_GROUP),
        "backend": backend,
        "timeout_s": None if timeout_s is None else number("timeout_s", timeout_s, 0, 3600, above=True),
    }


def version_of(field: str, value: Any) -> str:
    """A version is a string. Trainers that count their updates may send a number. Raises BadRequest."""
    if type(value) is int:
        return str(value)
    if not string(field, value):
        raise BadRequest(f"{field}: must not be empty")
    return value


def _change(given: dict[str, Any], *, stages: bool = True) -> Change:
    """`stages`: the route has the field `stage_only`."""
    if (selector := given.get("selector")) not in (None, "all", "target"):
        raise BadRequest(f"selector: {selector!r} is not offered: there is one model")
    version = given.get("weight_version")
    checksums = given.get("checksums")
    if checksums is not None:
        checksums = {name: string("checksums", value) for name, value in mapping("checksums", checksums).items()}
    return Change(
        version=None if version is None else version_of("weight_version", version),
        flush_cache=_flag(given, "flush_cache", default=True),
        abort_all=_flag(given, "abort_all_requests", default=False),
        keep_pause=_flag(given, "keep_pause", default=False),
        partial=_flag(given, "partial", default=False),
        stage_only=stages and _flag(given, "stage_only", default=False),
        checksums=checksums,
    )


def _flag(given: dict[str, Any], field: str, *, default: bool) -> bool:
    value = given.get(field)
    return default if value is None else boolean(field, value)


def _strings(field: str, value: Any) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise BadRequest(f"{field}: must be a list of strings")
    return value
