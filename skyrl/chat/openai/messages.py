"""Checks the messages of a chat: text and pictures, and no key that vLLM would ignore.

vLLM fetches images, audio and video from the addresses in a message. So only parts with text go on, and pictures that
are in the request itself, as a data URI. No address is opened, here or by the inference server, which gets nothing but
pictures that were decoded here before. `ChatPictures` counts the tokens that pictures take. Knows neither tenants nor
how a request is sent.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from skyrl.base.pictures.picture import MAX_PICTURES, BadPicture, PictureFormat, digest_of
from skyrl.base.pictures.vision import NoVision, VisionConfig
from skyrl.base.wire.decoding import decode_base64
from skyrl.base.wire.errors import RequestError
from skyrl.chat.openai.fields import checked_tool_calls, without_echoes
from skyrl.sampling.pictures import PictureChecks

PICTURE = "image_url"
"""The type of a part with a picture, and its key."""
MAX_REMEMBERED = 10_000
"""Pictures whose size is remembered: the turns of a conversation send the same pictures again."""
_DETAILS = ("auto", "low", "high")
_DATA_URI = re.compile(r"data:image/(png|jpe?g);base64,", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ChatPicture:
    """`name` is the picture's place in the request."""

    name: str
    format: PictureFormat
    base64: str

    @property
    def part(self) -> dict[str, Any]:
        """For the inference server."""
        return {"type": PICTURE, PICTURE: {"url": f"data:image/{self.format};base64,{self.base64}"}}


def picture_in(part: dict[str, Any], place: str) -> ChatPicture:
    """The picture of a part of a message. `detail` has no effect: the model's own processor decides how a picture is
    resized. Raises RequestError."""
    name = f"{place}.{PICTURE}"
    if unknown := part.keys() - {"type", PICTURE}:
        raise RequestError("is not a field that this server knows", field=f"{place}.{min(unknown)}")
    given = part.get(PICTURE)
    if not isinstance(given, dict) or not isinstance(url := given.get("url"), str):
        raise RequestError("must be an object with a url", field=name)
    if unknown := given.keys() - {"url", "detail"}:
        raise RequestError("is not a field that this server knows", field=f"{name}.{min(unknown)}")
    if given.get("detail", "auto") not in _DETAILS:
        raise RequestError(f"must be one of {', '.join(_DETAILS)}", field=f"{name}.detail")
    kind = _DATA_URI.match(url)
    if kind is None:
        raise RequestError(
            "must begin with 'data:image/png;base64,' or 'data:image/jpeg;base64,': this server opens no address",
            field=name,
        )
    return ChatPicture(name, "png" if kind[1].lower() == "png" else "jpeg", url[kind.end() :])


class ChatPictures:
    """Checks the pictures of chats. Belongs to one event loop."""

    def __init__(self, checks: PictureChecks, sight: VisionConfig | NoVision) -> None:
        self._checks = checks
        self._sight = sight
        self._sizes: dict[tuple[str, PictureFormat], tuple[int, int]] = {}

    async def tokens(self, pictures: Sequence[ChatPicture]) -> int:
        """How many tokens of the prompt the pictures take together. Raises RequestError naming the picture: 400 for a
        file that is no picture or that the model does not take, 429 if too many pictures wait for their check."""
        if isinstance(self._sight, NoVision):
            kind = f"{pictures[0].name.removesuffix(f'.{PICTURE}')}.type"
            raise RequestError(f"must be 'text': the base model takes no images: {self._sight}", field=kind)
        if len(pictures) > MAX_PICTURES:
            name = pictures[MAX_PICTURES].name
            raise RequestError(f"a chat holds {len(pictures)} images and may hold {MAX_PICTURES}", field=name)
        return sum([await self._tokens_of(picture, self._sight) for picture in pictures])

    async def _tokens_of(self, picture: ChatPicture, sight: VisionConfig) -> int:
        try:
            return sight.tokens(*await self._size(picture))
        except BadPicture as error:
            raise RequestError(str(error), field=picture.name) from error

    async def _size(self, picture: ChatPicture) -> tuple[int, int]:
        data, digest = await asyncio.to_thread(_read, picture.base64)
        key = digest, picture.format
        size = self._sizes.pop(key, None) or await self._checks.size(data, picture.format)
        self._sizes[key] = size
        while len(self._sizes) > MAX_REMEMBERED:
            del self._sizes[next(iter(self._sizes))]
        return size


def _read(text: str) -> tuple[bytes, str]:
    """The file and its digest. Raises BadPicture."""
    try:
        data = decode_base64(text)
    except ValueError as error:
        raise BadPicture(f"is not base64: {error}") from error
    return data, digest_of(data)


_KEYS = frozenset(
    {"content", "name", "reasoning", "reasoning_content", "refusal", "role", "tool_call_id", "tool_calls"}
)
_PART_KEYS = {"text": "text", "refusal": "refusal"}
"""Types of parts, and the key of each that holds its text."""
_TEXTS = ("name", "reasoning", "reasoning_content", "refusal", "tool_call_id")
TEMPLATE_KEYS = frozenset(
    {"add_generation_prompt", "continue_final_message", "conversation", "documents", "messages", "reasoning_effort"}
    | {"chat_template", "max_length", "padding", "return_assistant_tokens_mask", "return_dict", "return_tensors"}
    | {"processor_kwargs", "self", "tokenize", "tokenizer", "tokenizer_kwargs", "tools", "truncation"}
)
"""Arguments that have fields of their own, or that the renderer of the template takes instead of the template."""


def checked_messages(
    messages: Sequence[dict[str, Any]], first: int = 0
) -> tuple[list[dict[str, Any]], tuple[ChatPicture, ...]]:
    """The messages without empty keys, which clients send when they repeat an answer, and their pictures, which are not
    checked yet. `first` is the number of the first of them in the request. Raises RequestError."""
    if not messages:
        raise RequestError("must hold at least one message", field="messages")
    pictures: list[ChatPicture] = []
    checked = [_checked(message, f"messages[{index}]", pictures) for index, message in enumerate(messages, first)]
    return checked, tuple(pictures)


def _checked(message: dict[str, Any], place: str, pictures: list[ChatPicture]) -> dict[str, Any]:
    """Adds the message's pictures to `pictures`."""
    given = without_echoes(message)
    kept = {key: value for key, value in given.items() if key == "content" or value not in (None, [])}
    if unknown := kept.keys() - _KEYS:
        raise RequestError("is not a field that this server knows", field=f"{place}.{min(unknown)}")
    for key in ("role", *(key for key in _TEXTS if key in kept)):
        if not isinstance(kept.get(key), str):
            raise RequestError("must be a string", field=f"{place}.{key}")
    if "tool_calls" in kept:
        kept["tool_calls"] = checked_tool_calls(kept["tool_calls"], f"{place}.tool_calls")
    content = kept.get("content")
    if isinstance(content, list):
        kept["content"] = [
            _checked_part(part, f"{place}.content[{index}]", pictures) for index, part in enumerate(content)
        ]
    elif content is not None and not isinstance(content, str):
        raise RequestError("must be a string or a list of parts", field=f"{place}.content")
    return kept


def _checked_part(part: Any, place: str, pictures: list[ChatPicture]) -> dict[str, Any]:
    part = without_echoes(part)
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == PICTURE:
        pictures.append(picture_in(part, place))
        return pictures[-1].part
    key = _PART_KEYS.get(kind) if isinstance(kind, str) else None
    if key is None:
        raise RequestError("must be 'text' or 'image_url'", field=f"{place}.type")
    if not isinstance(part.get(key), str):
        raise RequestError("must be a string", field=f"{place}.{key}")
    if unknown := part.keys() - {"type", key}:
        raise RequestError("is not a field that this server knows", field=f"{place}.{min(unknown)}")
    return part


def check_template_arguments(arguments: dict[str, Any] | None) -> None:
    """Raises RequestError for an argument that would replace the model's own template, or has a field of its own."""
    if taken := (arguments or {}).keys() & TEMPLATE_KEYS:
        raise RequestError("cannot be set here", field=f"chat_template_kwargs.{min(taken)}")
