"""What a picture in a prompt is: bytes of a PNG or JPEG file with a digest, at a place among the tokens.

Knows no library for images, no model and no request.
"""

from __future__ import annotations

from hashlib import sha256
from typing import Literal, get_args

import msgspec

PictureFormat = Literal["png", "jpeg"]
FORMATS: tuple[PictureFormat, ...] = get_args(PictureFormat)
MAX_PICTURES = 64
"""The most pictures in one sequence."""
_MAGIC: dict[bytes, PictureFormat] = {b"\x89PNG\r\n\x1a\n": "png", b"\xff\xd8\xff": "jpeg"}


class BadPicture(ValueError):
    """A file that is no picture which this server takes. The message says why; the caller adds which picture it is."""


class PlacedPicture(msgspec.Struct, frozen=True):
    """A picture in a sequence of tokens. It takes the positions [start, start + tokens), which hold the model's
    `image_token_id`. `digest` is `digest_of` its file."""

    start: int
    tokens: int
    digest: str
    format: PictureFormat

    @property
    def stop(self) -> int:
        return self.start + self.tokens


class Pictures(msgspec.Struct, frozen=True):
    """The pictures of a prompt, in the order of their places, without overlap. Their files are stored for `tenant`. The
    prompt holds `image_token_id` at their places, and nowhere else."""

    tenant: str
    image_token_id: int
    placed: tuple[PlacedPicture, ...]


def format_of(data: bytes) -> PictureFormat:
    """The format of a file by its first bytes. Raises BadPicture."""
    for magic, found in _MAGIC.items():
        if data.startswith(magic):
            return found
    raise BadPicture("is neither a PNG nor a JPEG file")


def digest_of(data: bytes) -> str:
    """SHA-256 of a file, in hexadecimal."""
    return sha256(data).hexdigest()
