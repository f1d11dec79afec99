"""Pictures of a `/generate` request: SGLang's `image_data`, checked and put at their places in the prompt; and vLLM's
route for token ids and pictures, in the words of `/v1/completions`.

A picture is part of the request, as base64 or as a data URI. No address is opened and no file is read. Requests and
answers of both routes of vLLM have the same facts in other places. Knows no connection."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from cachetools import LRUCache

from skyrl.base.pictures.picture import MAX_PICTURES, BadPicture, digest_of, format_of
from skyrl.base.pictures.vision import NoVision, VisionConfig
from skyrl.base.wire.decoding import decode_base64
from skyrl.inference.sidecar.errors import BadRequest, Busy, VllmBroke
from skyrl.runtime.pictures.checker import NotChecked, PictureChecker, TooManyPictures

FIELD = "image_data"
MAX_REMEMBERED = 10_000
"""Pictures whose size is remembered: a group's samples have the same picture."""
_DATA_URI = re.compile(r"data:image/(?:png|jpe?g);base64,", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class PlacedPictures:
    """A prompt with pictures, for vLLM. `tokens` has one token for each picture; the prompt that the model computes has
    as many as the picture takes. `parts` are vLLM's `content_parts`."""

    tokens: list[int]
    parts: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class _Picture:
    part: dict[str, Any]
    tokens: int


def read_pictures(given: Any, count: int, batched: bool) -> list[tuple[str, ...]]:
    """The pictures of each prompt, as they were sent. Of a batch `given` has one element for each prompt: a picture, a
    list of them, or null. Clients send false and empty values for no pictures. Raises BadRequest."""
    if not given:
        return [()] * count
    if not batched:
        return [_of_prompt(given)]
    if not isinstance(given, list) or len(given) != count:
        raise BadRequest(f"{FIELD}: must be a list with one element for each of the {count} prompts")
    return [_of_prompt(one) if one else () for one in given]


def _of_prompt(given: Any) -> tuple[str, ...]:
    pictures = given if isinstance(given, list) else [given]
    for number, picture in enumerate(pictures, 1):
        if not isinstance(picture, str):
            raise BadRequest(f"{FIELD}: image {number} must be a string: base64, or a data URI")
    if len(pictures) > MAX_PICTURES:
        raise BadRequest(f"{FIELD}: a prompt has {len(pictures)} images and may have {MAX_PICTURES}")
    return tuple(pictures)


class Pictures:
    """Belongs to one event loop. `close` ends the worker that decodes pictures."""

    def __init__(self) -> None:
        self._checker = PictureChecker()
        self._sights: dict[str, VisionConfig] = {}
        self._sizes: LRUCache[str, tuple[int, int]] = LRUCache(MAX_REMEMBERED)

    async def close(self) -> None:
        await self._checker.close()

    async def place(self, given: Sequence[str], prompt: list[int], model: str) -> tuple[list[int], PlacedPictures]:
        """The prompt that the model of this path computes, and the same for vLLM. Each run of image tokens in `prompt`
        is the place of one picture: it has one token, or as many as the picture takes. Raises BadRequest and Busy."""
        sight = await self._sight(model)
        runs = [(token, len(list(run))) for token, run in groupby(prompt)]
        places = sum(token == sight.image_token_id for token, _ in runs)
        if places != len(given):
            raise BadRequest(
                f"{FIELD}: has {len(given)} images, and the prompt has places for {places} (runs of the token "
                f"{sight.image_token_id})"
            )
        pictures = [await self._picture(number, text, sight) for number, text in enumerate(given, 1)]
        whole: list[int] = []
        short: list[int] = []
        left = iter(enumerate(pictures, 1))
        for token, length in runs:
            if token != sight.image_token_id:
                whole += [token] * length
                short += [token] * length
                continue
            number, picture = next(left)
            if length not in (1, picture.tokens):
                raise BadRequest(
                    f"{FIELD}: the prompt has {length} tokens for image {number}, and the image takes {picture.tokens}"
                )
            whole += [token] * picture.tokens
            short.append(token)
        return whole, PlacedPictures(short, [picture.part for picture in pictures])

    async def _sight(self, model: str) -> VisionConfig:
        if model not in self._sights:
            try:
                self._sights[model] = await asyncio.to_thread(VisionConfig.of, model)
            except NoVision as error:
                raise BadRequest(f"{FIELD}: the model takes no images: {error}") from error
        return self._sights[model]

    async def _picture(self, number: int, text: str, sight: VisionConfig) -> _Picture:
        try:
            return await self._checked(text, sight)
        except BadPicture as error:
            raise BadRequest(f"{FIELD}: image {number} {error}") from error
        except (TooManyPictures, NotChecked) as error:
            raise Busy(f"{FIELD}: {error}") from error

    async def _checked(self, text: str, sight: VisionConfig) -> _Picture:
        data, digest = await asyncio.to_thread(_decoded, text)
        format = format_of(data)
        size = self._sizes.get(digest) or await self._checker.check(data, format)
        self._sizes[digest] = size
        url = f"data:image/{format};base64,{text[_start(text) :]}"
        return _Picture({"type": "image_url", "uuid": digest, "url": url}, sight.tokens(*size))


def _start(text: str) -> int:
    """Where the base64 of a picture begins."""
    kind = _DATA_URI.match(text)
    return 0 if kind is None else kind.end()


def _decoded(text: str) -> tuple[bytes, str]:
    """The file, and its digest. Raises BadPicture."""
    try:
        data = decode_base64(text[_start(text) :])
    except ValueError as error:
        raise BadPicture("is not base64 of a PNG or JPEG file: this server opens no addresses and no files") from error
    return data, digest_of(data)


PATH = "/inference/v1/generate"
_SAME = ("model", "priority", "cache_salt", "stream", "stream_options", "return_token_ids")
"""Fields that are no sampling parameters."""
_OTHER = ("prompt", "session_id", "return_tokens_as_token_ids")
"""Fields of completions that this route does not have."""


def generate_body(body: dict[str, Any], pictures: PlacedPictures) -> dict[str, Any]:
    """The request for a prompt with pictures, made of the request for a completion."""
    return {
        **{name: body[name] for name in _SAME if name in body},
        "token_ids": pictures.tokens,
        "content_parts": pictures.parts,
        "output_mode": "text",
        "sampling_params": {name: value for name, value in body.items() if name not in (*_SAME, *_OTHER)},
    }


def as_completion(answer: Any, prompt: list[int], *, chunk: bool) -> Any:
    """The answer, or a chunk of its stream, as a completion has it. `prompt`: what vLLM must have computed. Raises
    VllmBroke."""
    if not isinstance(answer, dict) or not isinstance(answer.get("choices"), list):
        return answer
    computed = answer.get("prompt_token_ids")
    if computed != prompt and not (chunk and computed is None):
        count = len(computed) if isinstance(computed, list) else None
        raise VllmBroke(f"vLLM made a prompt of {count} tokens, and {len(prompt)} were counted here, or other tokens")
    try:
        choices = [_choice(one) | {"prompt_logprobs": answer.get("prompt_logprobs")} for one in answer["choices"]]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise VllmBroke(f"vLLM's answer has other logprobs than tokens: {error}") from error
    return answer | {"choices": choices}


def _choice(given: dict[str, Any]) -> dict[str, Any]:
    content = (given.get("logprobs") or {}).get("content")
    if content is None:
        return given | {"logprobs": None}
    values = [one["logprob"] for one in content]
    rows = [{f"token_id:{token}": value} for token, value in zip(given["token_ids"], values, strict=True)]
    return given | {"logprobs": {"token_logprobs": values, "top_logprobs": rows}}
