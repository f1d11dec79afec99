"""Pictures are opened with vLLM's pixels, or refused with the reason; whatever the file holds, nothing else happens."""

from __future__ import annotations

import re
import zlib

import numpy as np
import pytest
from picture_files import (
    PNG_MAGIC,
    animation,
    black,
    chunk,
    header,
    jpeg,
    kinds_of_jpeg,
    kinds_of_png,
    png,
    turned,
    with_scans,
)
from PIL import ImageFile

from skyrl.base.pictures.decoding import MAX_BYTES, MAX_PIXELS, MAX_SCANS, opened, size_of
from skyrl.base.pictures.picture import BadPicture, PictureFormat

# Pillow warns of what it forgives, as vLLM does, and the worker process pays no attention to that.
pytestmark = pytest.mark.filterwarnings("ignore:Corrupt EXIF data")

KINDS = [("png", *kind) for kind in kinds_of_png()] + [("jpeg", *kind) for kind in kinds_of_jpeg()]


@pytest.mark.parametrize(("format", "kind", "data"), KINDS, ids=[f"{kind[0]} {kind[1]}" for kind in KINDS])
def test_the_pixels_are_those_of_vllm(format: PictureFormat, kind: str, data: bytes) -> None:
    from vllm.multimodal.media.image import ImageMediaIO

    ours, theirs = opened(data, format), ImageMediaIO().load_bytes(data).media
    assert (ours.mode, ours.size) == ("RGB", theirs.size), kind
    assert np.array_equal(np.asarray(ours), np.asarray(theirs)), kind
    assert size_of(data, format) == ours.size


def test_pixels_are_right_where_they_can_be_told_by_hand() -> None:
    """The test above would not notice if both were wrong."""
    gray_alpha = np.array(opened(png(2, 1, color=4, seed=3), "png"))
    value, alpha = np.random.default_rng(3).integers(0, 256, (1, 2, 2))[0, 0]
    assert abs(int(gray_alpha[0, 0, 0]) - (value * alpha + 255 * (255 - alpha)) / 255) <= 1
    deep = np.array(opened(png(2, 1, bits=16, seed=3), "png"))
    assert deep.tolist() == (np.random.default_rng(3).integers(0, 2**16, (1, 2, 3)) // 256).tolist()


@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_size_is_that_after_rotation(orientation: int) -> None:
    expected = (24, 40) if orientation >= 5 else (40, 24)
    assert size_of(jpeg(exif=turned(orientation)), "jpeg") == expected


def bomb(name: bytes) -> bytes:
    """A chunk of 300 KB that grows to 64 MiB. Every process of the tests makes it: a smaller one takes three times as
    long."""
    return chunk(name, b"a\0\0" + zlib.compress(bytes(64 * 2**20), 1))


REFUSED = {
    "another format": (jpeg(), "png", "is said to be png, and the file is jpeg"),
    "neither": (b"GIF89a" + bytes(100), "jpeg", "is neither a PNG nor a JPEG file"),
    "empty": (b"", "png", "is neither a PNG nor a JPEG file"),
    "magic alone": (PNG_MAGIC, "png", "is not a complete and valid PNG file"),
    "magic of a JPEG alone": (b"\xff\xd8\xff", "jpeg", "is not a complete and valid JPEG file"),
    "too many bytes": (
        png() + bytes(MAX_BYTES),
        "png",
        f"has {len(png()) + MAX_BYTES} bytes; the limit is {MAX_BYTES}",
    ),
    "too many pixels": (
        PNG_MAGIC + header(8001, 8000) + chunk(b"IDAT", b""),
        "png",
        f"is 8001 x 8000 pixels; the limit is {MAX_PIXELS}",
    ),
    "more pixels than Pillow takes": (
        PNG_MAGIC + header(2**31 - 1, 2**31 - 1) + chunk(b"IDAT", b""),
        "png",
        "limit is",
    ),
    "no pixels": (PNG_MAGIC + header(0, 5) + chunk(b"IDAT", b"") + chunk(b"IEND", b""), "png", "not a complete"),
    "truncated": (png()[:-30], "png", "is not a complete and valid PNG file"),
    "truncated JPEG": (jpeg()[:-30], "jpeg", "is not a complete and valid JPEG file: image file is truncated"),
    "frames": (animation(3), "png", "is an animation of 3 frames"),
    "16-bit gray": (png(bits=16, color=0), "png", "is 16-bit gray"),
    "many scans": (with_scans(jpeg(progressive=True), MAX_SCANS), "jpeg", f"has more than {MAX_SCANS} scans"),
    "text that grows": (png(chunks=bomb(b"zTXt")), "png", "too large"),
    "a color profile that grows": (png(chunks=bomb(b"iCCP")), "png", "too large"),
    "an unknown kind": (
        PNG_MAGIC + header(5, 5, bits=3) + chunk(b"IDAT", b""),
        "png",
        "is not a complete and valid PNG",
    ),
}


@pytest.mark.parametrize(("data", "format", "reason"), REFUSED.values(), ids=REFUSED)
def test_refused_with_the_reason(data: bytes, format: PictureFormat, reason: str) -> None:
    for call in (opened, size_of):
        with pytest.raises(BadPicture, match=re.escape(reason)) as caught:
            call(data, format)
        assert "0x" not in str(caught.value)
        assert "\n" not in str(caught.value)


def test_the_largest_picture_is_taken() -> None:
    assert size_of(black(8000), "png") == (8000, 8000)


def test_as_many_scans_as_the_bound_are_taken() -> None:
    data = jpeg("L", progressive=True)
    scans = data.count(b"\xff\xda")
    assert size_of(with_scans(data, MAX_SCANS - scans), "jpeg") == (40, 24)
    with pytest.raises(BadPicture, match="scans"):
        opened(with_scans(data, MAX_SCANS - scans + 1), "jpeg")


def test_what_follows_a_jpeg_picture_counts_no_scans() -> None:
    """Phones append films of several MB, in which the bytes of the marker occur by chance."""
    assert size_of(jpeg() + b"\xff\xda\x00\x02" * 1000, "jpeg") == (40, 24)


def test_a_process_that_forgives_truncated_files_would_break_the_rule() -> None:
    """A flag of the process, which nothing here sets."""
    assert ImageFile.LOAD_TRUNCATED_IMAGES is False
