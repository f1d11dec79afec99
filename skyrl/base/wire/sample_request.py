"""The input that sample requests share with training requests, with its image chunks; and the body of a sample request.

`take_out` makes bodies without the files of their images.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import sha256
from typing import Annotated, Any, ClassVar, cast

import msgspec
from google.protobuf.message import DecodeError

from skyrl.base.wire import tinker_pb2 as pb
from skyrl.base.wire.decoding import decode_base64, decode_json
from skyrl.base.wire.errors import RequestError
from skyrl.base.wire.tensors import JsonTensor

LOCATION = "sha256:"
"""How the location of a stored image begins; its digest, in hexadecimal, follows."""
_LOCATION = re.compile(LOCATION + "([0-9a-f]{64})")
MAX_FILES = 1024
"""The most different images in one request."""
_JSON_MARKS = (b'"iVBORw0KGgo', b'"/9j', b'"\\/9j', b'"location"', b"\\u")  # an escape may hide any of the others
_PROTO_MARKS = (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", LOCATION.encode())


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


class Chunk(msgspec.Struct):
    """A part of an input. The field that is set tells the kind of the chunk: SDK 0.16 sends no `type`."""

    tokens: list[int] | None = None
    data: str | None = None
    location: str | None = None
    dmel: str | None = None
    format: str | None = None
    expected_tokens: int | None = None


class ModelInput(msgspec.Struct):
    chunks: list[Chunk]

    @property
    def is_text(self) -> bool:
        """Whether all chunks are text. Quick for the one chunk that most prompts have."""
        chunks = self.chunks
        return (len(chunks) == 1 and chunks[0].tokens is not None) or all(chunk.tokens is not None for chunk in chunks)


class Distribution(msgspec.Struct):
    """From which distribution each token is drawn. vLLM has all these fields under the same names, so a new field gets
    from the request to vLLM by its line here. `check` has its bounds."""

    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0

    def __post_init__(self) -> None:
        self.top_k = self.top_k or -1  # both are off

    def check(self) -> None:
        """Raises RequestError naming the field."""
        if not (math.isfinite(self.temperature) and self.temperature >= 0.0):
            raise _out_of_range("temperature", f"must be 0 (greedy) or a positive number, got {self.temperature}")
        if not 0.0 < self.top_p <= 1.0:
            raise _out_of_range("top_p", f"must be in (0, 1], got {self.top_p}")
        if self.top_k < -1:
            raise _out_of_range("top_k", f"must be -1 (off) or at least 1, got {self.top_k}")


def _out_of_range(name: str, message: str) -> RequestError:
    return RequestError(message, field=f"sampling_params.{name}")


class SamplingParams(Distribution):
    max_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str | int] | None = None

    @property
    def distribution(self) -> Distribution:
        """The fields of the distribution alone."""
        return Distribution(*(getattr(self, name) for name in Distribution.__struct_fields__))


class SampleRequest(msgspec.Struct):
    checked_vocab: ClassVar[int | None] = None
    """The decoder has found all ids of the prompt in [0, checked_vocab). None: it has not looked."""

    prompt: ModelInput
    sampling_params: SamplingParams = msgspec.field(default_factory=SamplingParams)
    sampling_session_id: str | None = None
    seq_id: int | None = None
    num_samples: int = 1
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: JsonTensor | None = None
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_last_n: int | None = None


def decode_sample_request(body: bytes, vocab_size: int | None) -> SampleRequest:
    """The request in a body. The decoder looks at the ids of the prompt, too, because to look at them afterwards takes
    longer than to decode them. A request with an id outside of the vocabulary is returned with `checked_vocab` None.
    Raises RequestError naming the field."""
    if vocab_size is not None:
        try:
            return _checking_decoder(vocab_size)(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            pass  # `decode_json` finds the fault again and names it, unless it is an id, which the caller names
    return decode_json(SampleRequest, body)


@lru_cache(maxsize=4)
def _checking_decoder(vocab_size: int) -> Callable[[bytes], SampleRequest]:
    token = Annotated[int, msgspec.Meta(ge=0, lt=vocab_size)]
    chunk = msgspec.defstruct("Chunk", [("tokens", list[token] | None, None)], bases=(Chunk,))
    prompt = msgspec.defstruct("ModelInput", [("chunks", list[chunk])], bases=(ModelInput,))
    request = msgspec.defstruct(
        "SampleRequest",
        [("prompt", prompt)],
        bases=(SampleRequest,),
        namespace={"checked_vocab": vocab_size},
        kw_only=True,
    )
    return cast(Callable[[bytes], SampleRequest], msgspec.json.Decoder(request).decode)


def tokens_of(prompt: ModelInput, field: str = "prompt") -> list[int]:
    """All token ids of an input of text alone, in order. Raises RequestError for empty input and other kinds of
    chunks."""
    if len(prompt.chunks) == 1 and prompt.chunks[0].tokens:
        return prompt.chunks[0].tokens
    tokens, images = text_and_images(prompt, field)
    if images:
        raise RequestError("the base model takes text only", field=images[0].name)
    if not tokens:
        raise RequestError("must hold at least one token", field=field)
    return tokens


def text_and_images(prompt: ModelInput, field: str = "prompt") -> tuple[list[int], list[ImagePart]]:
    """The token ids of the text, in order, and the images between them. Raises RequestError for other kinds of
    chunks."""
    tokens: list[int] = []
    images: list[ImagePart] = []
    for index, chunk in enumerate(prompt.chunks):
        name = f"{field}.chunks[{index}]"
        if chunk.tokens is not None:
            tokens += chunk.tokens
        elif chunk.data is not None or chunk.location is not None:
            location, form = chunk.location or "", chunk.format or ""
            images.append(ImagePart(name, len(tokens), location, form, chunk.expected_tokens))
        else:
            raise RequestError("is neither text nor an image, and other chunks are not served", field=name)
    return tokens, images
