"""SGLang's requests for new weights, read and checked. Each function raises BadRequest, which names the field."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from skyrl.inference.sidecar.call import boolean, integer, mapping, number, string
from skyrl.inference.sidecar.errors import BadRequest

DEFAULT_GROUP = "weight_update_group"
LOAD_FORMATS = (None, "auto", "safetensors")
MAX_RANKS = 1 << 20


@dataclass(frozen=True, slots=True)
class Change:
    """What all kinds of update have. `version` None: the version of before goes up. `partial`: not all tensors are
    sent."""

    version: str | None
    flush_cache: bool
    abort_all: bool
    keep_pause: bool
    partial: bool
    checksums: dict[str, str] | None


@dataclass(frozen=True, slots=True)
class FromDisk:
    """`stage_only`: read and check now, and apply when the same request comes without this field. `keep`: the version's
    bytes stay in memory, so that it can be the `base` of a later one. `base`: the files have what differs from it."""

    model_path: str
    change: Change
    stage_only: bool
    keep: bool = False
    base: str | None = None


@dataclass(frozen=True, slots=True)
class FromGroup:
    """One bucket."""

    group: str
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    change: Change


@dataclass(frozen=True, slots=True)
class FromMemory:
    """Tensors in memory of a trainer on this machine: the arguments of the worker's call `map`, None without tensors.
    `stage_only`: others follow. `update`: the trainer's name for the update, of which these are a part."""

    found: dict[str, Any] | None
    update: str | None
    change: Change
    stage_only: bool


@dataclass(frozen=True, slots=True)
class NewGroup:
    """`timeout_s` bounds the forming, and each broadcast later."""

    address: str
    port: int
    rank_offset: int
    world_size: int
    name: str
    backend: str
    timeout_s: float | None


def from_disk(given: dict[str, Any]) -> FromDisk:
    load_format = given.get("load_format")
    if load_format not in LOAD_FORMATS:
        raise BadRequest(f"load_format: {load_format!r} is not offered; the files must be safetensors")
    path = string("model_path", given.get("model_path"))
    if not path.startswith("/"):
        raise BadRequest(f"model_path: {path!r} is not an absolute path on the worker's machine")
    base = given.get("base")
    return FromDisk(
        path,
        _change(given),
        _flag(given, "stage_only", default=False),
        _flag(given, "keep", default=False),
        None if base is None else string("base", base),
    )


def from_group(given: dict[str, Any]) -> FromGroup:
    _check_each_by_name(given)
    names, dtypes, sizes = _tensors(given)
    if not names:
        raise BadRequest("names: must be a list of names that is not empty")
    return FromGroup(
        string("group_name", given.get("group_name") or DEFAULT_GROUP), names, dtypes, sizes, _change(given)
    )


def from_memory(given: dict[str, Any]) -> FromMemory:
    _check_each_by_name(given)
    change, stage_only = _change(given), _flag(given, "stage_only", default=False)
    update = given.get("update")
    if update is not None:
        update = string("update", update)
    if given.get("memory") is None:
        return FromMemory(None, update, change, stage_only)
    names, dtypes, sizes = _tensors(given)
    places = given.get("places")
    if not isinstance(places, list) or len(places) != len(names):
        raise BadRequest("places: must be a list of integers, one for each name")
    found = {
        "names": names,
        "dtypes": dtypes,
        "shapes": sizes,
        "places": [integer("places", place, 0) for place in places],
        "memory": mapping("memory", given["memory"]),
        "version": change.version,
        "checksums": change.checksums,
        "update": update,
    }
    return FromMemory(found, update, change, stage_only)


def _check_each_by_name(given: dict[str, Any]) -> None:
    """Raises BadRequest for SGLang's formats of several tensors in one."""
    load_format = given.get("load_format")
    if load_format is not None:
        raise BadRequest(f"load_format: {load_format!r} is not offered: each tensor is sent under its own name")


def _tensors(given: dict[str, Any]) -> tuple[list[str], list[str], list[list[int]]]:
    """Names, dtypes and shapes, as many of each."""
    names, dtypes = (_strings(field, given.get(field)) for field in ("names", "dtypes"))
    shapes = given.get("shapes")
    if not isinstance(shapes, list) or not all(isinstance(shape, list) for shape in shapes):
        raise BadRequest("shapes: must be a list of lists of integers")
    sizes = [[integer("shapes", size, 0) for size in shape] for shape in shapes]
    if not len(names) == len(dtypes) == len(sizes):
        raise BadRequest(f"names, dtypes, shapes: have {len(names)}, {len(dtypes)} and {len(sizes)} entries")
    return names, dtypes, sizes


def new_group(given: dict[str, Any]) -> NewGroup:
    port = given.get("master_port")
    if isinstance(port, str) and port.isdigit():  # one of the clients sends it so
        port = int(port)
    backend = string("backend", given.get("backend") or "nccl")
    if backend not in ("nccl", "gloo"):
        raise BadRequest(f"backend: {backend!r} is not one of nccl, gloo")
    timeout_s = given.get("timeout_s")
    return NewGroup(
        address=string("master_address", given.get("master_address")),
        port=integer("master_port", port, 1, 65535),
        rank_offset=integer("rank_offset", given.get("rank_offset"), 1, MAX_RANKS),
        world_size=integer("world_size", given.get("world_size"), 2, MAX_RANKS),
        name=string("group_name", given.get("group_name") or DEFAULT_GROUP),
        backend=backend,
        timeout_s=None if timeout_s is None else number("timeout_s", timeout_s, 0, 3600, above=True),
    )


def version_of(field: str, value: Any) -> str:
    """A version is a string. Trainers that count their updates may send a number. Raises BadRequest."""
    if type(value) is int:
        return str(value)
    if not string(field, value):
        raise BadRequest(f"{field}: must not be empty")
    return value


def _change(given: dict[str, Any]) -> Change:
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
        checksums=checksums,
    )


def _flag(given: dict[str, Any], field: str, *, default: bool) -> bool:
    value = given.get(field)
    return default if value is None else boolean(field, value)


def _strings(field: str, value: Any) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise BadRequest(f"{field}: must be a list of strings")
    return value
