"""Opens the file of a picture, under bounds, with the pixels that vLLM's own loader gives.

A bound on the scans of a JPEG file is one of them: each scan of a progressive file passes over the entire picture, and
may take a few bytes, so without a bound a small file keeps the decoder busy for hours.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from io import BytesIO

from PIL import Image, ImageOps
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile

from skyrl.base.pictures.picture import BadPicture, PictureFormat, format_of

MAX_SCANS = 50
"""Encoders write 1 to about 20."""

_MARKER = re.compile(rb"\xff[\x01-\xcf\xd8-\xfe]")
"""A marker as ITU-T T.81 B.1.1 defines them, but not the restart markers, which stand inside of a scan's data."""
_START_OF_SCAN, _START, _END, _TEMPORARY = 0xDA, 0xD8, 0xD9, 0x01


def has_more_scans(data: bytes, bound: int) -> bool:
    """Whether the first picture of a JPEG file has more scans than `bound`. Reads markers alone."""
    scans = at = 0
    while marker := _MARKER.search(data, at):
        at = marker.end()
        code = data[at - 1]
        if code == _END:
            return False
        if code in (_START, _TEMPORARY):
            continue  # these two have no length
        scans += code == _START_OF_SCAN
        if scans > bound:
            return True
        at += int.from_bytes(data[at : at + 2], "big")
    return False


MAX_BYTES = 20 * 2**20
"""Of one file."""
MAX_PIXELS = 64_000_000
"""Width times height. Below the bounds of Pillow (89 million) and vLLM (179 million, VLLM_MAX_IMAGE_PIXELS)."""

_READERS: dict[PictureFormat, Callable[[BytesIO], PngImageFile | JpegImageFile]] = {
    "png": PngImageFile,
    "jpeg": JpegImageFile,
}
_WHITE = (255, 255, 255)


def size_of(data: bytes, format: PictureFormat) -> tuple[int, int]:
    """Width and height in pixels of what `opened` gives: after the rotation that EXIF asks for. Decodes the entire
    file, so it raises BadPicture whenever `opened` does."""
    return opened(data, format).size


def opened(data: bytes, format: PictureFormat) -> Image.Image:
    """The picture as 8-bit RGB, rotated as its EXIF says, transparent parts over white. Raises BadPicture.

    The pixels equal those of vLLM's ImageMediaIO. Refused beside malformed and truncated files: animated PNGs, which
    would show one of several frames, and 16-bit gray, whose conversion cuts values at 255 (of 16-bit colors Pillow
    takes the high byte). Of a JPEG file with several pictures, such as a phone's with a depth map, the first counts.
    """
    _check_kind(data, format)
    with _Decoding(format):
        file = _READERS[format](BytesIO(data))
        _check_header(file)
        if format == "jpeg" and has_more_scans(data, MAX_SCANS):
            raise BadPicture(f"has more than {MAX_SCANS} scans")
        file.load()
        picture: Image.Image = file
        del file  # frees the pixels as soon as they are rotated
        with suppress(Exception):  # vLLM shows a picture whose EXIF is malformed unrotated
            picture = ImageOps.exif_transpose(picture)
        return _over_white(picture)


class _Decoding:
    """Turns whatever Pillow raises into BadPicture. Malformed files make it raise SyntaxError, OSError, ValueError,
    TypeError, IndexError, KeyError, AttributeError, struct.error, zlib.error and MemoryError, at least."""

    def __init__(self, format: PictureFormat) -> None:
        self._format = format

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if isinstance(error, MemoryError):
            raise BadPicture("takes too much memory to decode") from error
        if isinstance(error, Exception) and not isinstance(error, BadPicture):
            raise BadPicture(f"is not a complete and valid {self._format.upper()} file: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """In Pillow's words, but not in Python's about indexes and buffers, which Pillow repeats as a SyntaxError."""
    if isinstance(error, (OSError, SyntaxError, ValueError)) and str(error.__cause__) != str(error):
        return str(error)
    return "its parts do not fit together"


def _check_kind(data: bytes, format: PictureFormat) -> None:
    """By size and first bytes. Raises BadPicture."""
    if len(data) > MAX_BYTES:
        raise BadPicture(f"has {len(data)} bytes; the limit is {MAX_BYTES}")
    if (found := format_of(data)) != format:
        raise BadPicture(f"is said to be {format}, and the file is {found}")


def _check_header(picture: PngImageFile | JpegImageFile) -> None:
    """Before pixels are decoded. Raises BadPicture."""
    width, height = picture.size
    if width * height > MAX_PIXELS:
        raise BadPicture(f"is {width} x {height} pixels; the limit is {MAX_PIXELS} pixels in all")
    if isinstance(picture, PngImageFile) and picture.n_frames > 1:
        raise BadPicture(f"is an animation of {picture.n_frames} frames; send each frame as a picture")
    if picture.mode.startswith("I"):
        raise BadPicture("is 16-bit gray, which has no right conversion to 8 bits; send 8-bit gray or color")


def _over_white(picture: Image.Image) -> Image.Image:
    """As 8-bit RGB. vLLM pays attention to the transparent color of a PNG file unless the file is RGB without alpha."""
    if picture.mode == "RGB":
        return picture
    if picture.mode in ("RGBA", "LA", "PA") or "transparency" in picture.info:
        picture = picture.convert("RGBA")
        white = Image.new("RGB", picture.size, _WHITE)
        white.paste(picture, mask=picture.getchannel("A"))
        return white
    return picture.convert("RGB")
