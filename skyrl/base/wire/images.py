"""Image chunks of an input, and bodies without their files.

A stored body holds no image file: it names each by its digest, as an `image_asset_pointer` of Tinker does. A client may
send such pointers, too. Knows no library for images, and not what a model sees.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import msgspec
from google.protobuf.message import DecodeError

from skyrl.base.wire import tinker_pb2 as pb
from skyrl.base.wire.errors import RequestError
from skyrl.base.wire.long_base64 import decode_base64

LOCATION = "sha256:"
"""How the location of a stored image begins; its digest, in hexadecimal, follows."""
_LOCATION = re.compile(LOCATION + "([0-9a-f]{64})")
MAX_FILES = 1024
"""The most different images in one request."""
_JSON_MARKS = (b'"iVBORw0KGgo', b'"/9j/', b'"\\/9j\\/', b'"location"')
_PROTO_MARKS = (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff")


@dataclass(frozen=True)
class ImagePart:
    """An image chunk. `name` is its place in the request. `before` tokens of text come before it. `location` is where
    its file is stored; empty if the body has the file itself. `override`: the width and height in pixels that a
    protobuf chunk may give."""

    name: str
    before: int
    location: str
    format: str
    expected_tokens: int | None = None
    override: tuple[int, int] | None = None


@dataclass(frozen=True)
class TakenOut:
    """A body whose image files are taken out. `files`: by digest. `names`: for each digest in the body, the places of
    its chunks in the request."""

    body: bytes
    files: dict[str, bytes] = field(default_factory=dict)
    names: dict[str, list[str]] = field(default_factory=dict)


def digest_in(location: str, name: str) -> str:
    """The digest in the location of a stored image. Raises RequestError naming the chunk."""
    if not location:
        raise RequestError(
            f"is neither a PNG nor a JPEG file, or the request has more than {MAX_FILES} different files", field=name
        )
    if (found := _LOCATION.fullmatch(location)) is None:
        raise RequestError(
            f"{location[:200]!r} is no image that this server stores: send the file itself as an image chunk, or "
            f"'{LOCATION}' and the SHA-256 of one sent before; no address is opened",
            field=f"{name}.location",
        )
    return found[1]


def may_have_images(body: bytes, body_format: str) -> bool:
    """False if a training body has no image that could be valid: looking through the bytes is faster than decoding."""
    return any(mark in body for mark in (_PROTO_MARKS if body_format == "proto" else _JSON_MARKS))


def take_out(body: bytes, body_format: str) -> TakenOut:
    """The body with pointers in place of image files. Raises RequestError if it cannot be decoded, or has too many."""
    taken = _from_proto(body) if body_format == "proto" else _from_json(body)
    if len(taken.names) > MAX_FILES:
        raise RequestError(f"the request holds {len(taken.names)} different images; it may hold {MAX_FILES}")
    return taken


def _from_proto(body: bytes) -> TakenOut:
    try:
        message = pb.ForwardBackwardRequest.FromString(body)
    except DecodeError as error:
        raise RequestError(f"the body is not a ForwardBackwardRequest: {error}") from error
    taken = TakenOut(b"")
    for index, datum in enumerate(message.data):
        for place, chunk in enumerate(datum.model_input):
            if chunk.WhichOneof("chunk") == "image":
                name = f"data[{index}].model_input.chunks[{place}]"
                if chunk.image.location:
                    _name(taken, chunk.image.location, name)
                else:
                    chunk.image.location = _take(taken, chunk.image.data, name)
                    chunk.image.ClearField("data")
    return TakenOut(message.SerializeToString(deterministic=True), taken.files, taken.names)


def _from_json(body: bytes) -> TakenOut:
    try:
        request: Any = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"the body is not JSON: {error}") from error
    taken = TakenOut(b"")
    for chunk, name in _json_chunks(request):
        data, location = chunk.get("data"), chunk.get("location")
        if isinstance(data, str):
            try:
                file = decode_base64(data)
            except ValueError as error:
                raise RequestError(f"is not base64: {error}", field=f"{name}.data") from error
            del chunk["data"]
            chunk |= {"type": "image_asset_pointer", "location": _take(taken, file, name)}
        elif isinstance(location, str):
            _name(taken, location, name)
    return TakenOut(msgspec.json.encode(request), taken.files, taken.names)


def _take(taken: TakenOut, file: bytes, name: str) -> str:
    digest = sha256(file).hexdigest()
    taken.files.setdefault(digest, file)
    return _name(taken, LOCATION + digest, name)


def _name(taken: TakenOut, location: str, name: str) -> str:
    if (found := _LOCATION.fullmatch(location)) is not None:
        taken.names.setdefault(found[1], []).append(name)
    return location


def _json_chunks(request: Any) -> Iterator[tuple[dict[str, Any], str]]:
    """The image chunks of a body, and their places in it. A body of another shape is refused when it is decoded."""
    inputs = [(_of(request, "prompt"), "prompt")]
    for command in ("forward_backward_input", "forward_input"):
        data = _of(_of(request, command), "data")
        inputs += [
            (_of(datum, "model_input"), f"data[{index}].model_input")
            for index, datum in enumerate(data if isinstance(data, list) else ())
        ]
    for model_input, name in inputs:
        chunks = _of(model_input, "chunks")
        for place, chunk in enumerate(chunks if isinstance(chunks, list) else ()):
            if isinstance(chunk, dict) and chunk.get("tokens") is None:
                yield chunk, f"{name}.chunks[{place}]"


def _of(value: Any, key: str) -> Any:
    return value.get(key) if isinstance(value, dict) else None
