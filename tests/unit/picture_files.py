"""Files of pictures as tests need them: of every kind that PNG and JPEG know, and such that Pillow does not write."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from io import BytesIO
from typing import Any

import numpy as np
from PIL import Image

PNG_MAGIC = b"\x89PNG\r\n\x1a\n"
CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
"""Of PNG's color types: gray, color, palette, gray with alpha, color with alpha."""
ADAM7 = ((0, 0, 8, 8), (0, 4, 8, 8), (4, 0, 8, 4), (0, 2, 4, 4), (2, 0, 4, 2), (0, 1, 2, 2), (1, 0, 2, 1))
"""First row, first column, and their steps, of the passes of an interlaced PNG file."""


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def header(width: int, height: int, bits: int = 8, color: int = 2, interlaced: bool = False) -> bytes:
    return chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, bits, color, 0, 0, interlaced))


def png(
    width: int = 9,
    height: int = 7,
    *,
    bits: int = 8,
    color: int = 2,
    interlaced: bool = False,
    chunks: bytes = b"",
    seed: int = 0,
) -> bytes:
    """Random pixels. `chunks` stand between the header and the pixels."""
    values = np.random.default_rng(seed).integers(0, 2**bits, (height, width, CHANNELS[color]))
    passes = ADAM7 if interlaced else ((0, 0, 1, 1),)
    rows = b"".join(
        _rows(values[row::row_step, column::column_step], bits) for row, column, row_step, column_step in passes
    )
    pixels = chunk(b"IDAT", zlib.compress(rows, 1))
    return PNG_MAGIC + header(width, height, bits, color, interlaced) + chunks + pixels + chunk(b"IEND", b"")


def _rows(values: np.ndarray, bits: int) -> bytes:
    """Unfiltered rows of [rows, columns, channels]."""
    if 0 in values.shape:
        return b""
    if bits == 16:
        return b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    digits = np.unpackbits(values.astype(np.uint8)[..., None], axis=-1)[..., 8 - bits :]
    return b"".join(b"\0" + np.packbits(row.reshape(-1)).tobytes() for row in digits)


def palette(size: int) -> bytes:
    return chunk(b"PLTE", np.random.default_rng(1).integers(0, 256, size * 3, np.uint8).tobytes())


def transparency(*values: int, bytes_each: int = 1) -> bytes:
    return chunk(b"tRNS", b"".join(value.to_bytes(bytes_each, "big") for value in values))


def noise(mode: str, width: int = 40, height: int = 24) -> Image.Image:
    channels = {"L": 1, "RGB": 3, "CMYK": 4}[mode]
    smooth = np.random.default_rng(2).integers(0, 256, (height // 4 + 1, width // 4 + 1, channels), np.uint8)
    values = smooth.repeat(4, 0).repeat(4, 1)[:height, :width]
    return Image.fromarray(values[..., 0] if mode == "L" else values, mode=None if mode != "CMYK" else "CMYK")


def jpeg(mode: str = "RGB", width: int = 40, height: int = 24, **how: Any) -> bytes:
    file = BytesIO()
    noise(mode, width, height).save(file, "JPEG", **how)
    return file.getvalue()


def turned(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


def turned_png(orientation: int, *, behind_pixels: bool) -> bytes:
    """With an eXIf chunk before or behind the pixels, as PNG allows both."""
    file, exif = png(), chunk(b"eXIf", turned(orientation).tobytes()[6:])
    at = len(file) - 12 if behind_pixels else len(PNG_MAGIC) + 25
    return file[:at] + exif + file[at:]


def without_adobe(data: bytes) -> bytes:
    """A JPEG file without the marker that says who wrote it, after which CMYK is not inverted."""
    at = data.index(b"\xff\xee\x00\x0eAdobe")
    return data[:at] + data[at + 16 :]


def with_scans(data: bytes, scans: int) -> bytes:
    """A progressive JPEG file whose last scan follows `scans` times more."""
    at = data.rindex(b"\xff\xda")
    return data[:at] + data[at:-2] * (scans + 1) + data[-2:]


def plain(side: int, mode: str = "RGB", **how: Any) -> bytes:
    """A square of one color as a progressive JPEG file. Each scan takes few bytes, and work for all pixels."""
    file = BytesIO()
    Image.new(mode, (side, side), (9, 99, 200, 7)[: len(mode)]).save(file, "JPEG", progressive=True, **how)
    return file.getvalue()


def black(side: int) -> bytes:
    """A square of bits as a PNG file: few bytes, and 4 for each pixel once it is RGB."""
    rows = zlib.compress(bytes((side // 8 + 1) * side), 1)
    return PNG_MAGIC + header(side, side, bits=1, color=0) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def animation(frames: int) -> bytes:
    file = BytesIO()
    first, *others = [Image.new("RGB", (8, 8), (50 * number, 0, 0)) for number in range(frames)]
    first.save(file, "PNG", save_all=True, append_images=others)
    return file.getvalue()


def two_pictures() -> bytes:
    """A JPEG file with two pictures, as phones write them (MPO)."""
    file = BytesIO()
    noise("RGB").save(file, "MPO", save_all=True, append_images=[noise("RGB", 16, 16)])
    return file.getvalue()


def kinds_of_png() -> Iterator[tuple[str, bytes]]:
    for interlaced in (False, True):
        end = " interlaced" * interlaced
        for bits in (1, 2, 4, 8):
            yield f"gray {bits}{end}", png(bits=bits, color=0, interlaced=interlaced)
            table = palette(2**bits)
            yield f"palette {bits}{end}", png(bits=bits, color=3, interlaced=interlaced, chunks=table)
        for bits in (8, 16):
            yield f"color {bits}{end}", png(bits=bits, color=2, interlaced=interlaced)
            yield f"gray alpha {bits}{end}", png(bits=bits, color=4, interlaced=interlaced)
            yield f"color alpha {bits}{end}", png(bits=bits, color=6, interlaced=interlaced)
    table = palette(16)
    yield "palette, one color transparent", png(bits=4, color=3, chunks=table + transparency(255, 0, 255))
    yield "palette, colors half transparent", png(bits=4, color=3, chunks=table + transparency(255, 100, 7, 0))
    yield "palette too short for the pixels", png(bits=8, color=3, chunks=table)
    yield "gray, one value transparent", png(bits=2, color=0, chunks=transparency(1, bytes_each=2))
    yield "bits, one value transparent", png(bits=1, color=0, chunks=transparency(1, bytes_each=2))
    yield "color, one color transparent", png(chunks=transparency(1, 2, 3, bytes_each=2))
    for size in ((1, 1), (1, 10_000), (10_000, 1), (640, 3)):
        yield f"{size[0]} x {size[1]}", png(*size)
    for orientation in range(1, 10):
        yield f"turned {orientation}", turned_png(orientation, behind_pixels=False)
        yield f"turned {orientation}, told at the end", turned_png(orientation, behind_pixels=True)
    yield "malformed EXIF", png(chunks=chunk(b"eXIf", b"MM\x00*\x00\x00\x00\xff nothing"))


def kinds_of_jpeg() -> Iterator[tuple[str, bytes]]:
    for mode in ("L", "RGB", "CMYK"):
        for progressive in (False, True):
            yield f"{mode}{' progressive' * progressive}", jpeg(mode, progressive=progressive)
    yield "CMYK, not inverted", without_adobe(jpeg("CMYK"))
    yield "colors not as YCbCr", jpeg(keep_rgb=True)
    yield "no subsampling", jpeg(subsampling=0)
    yield "restart markers", jpeg(restart_marker_blocks=1)
    yield "two pictures", two_pictures()
    for size in ((1, 1), (1, 10_000), (10_000, 1)):
        yield f"{size[0]} x {size[1]}", jpeg("RGB", *size)
    for orientation in range(1, 10):
        yield f"turned {orientation}", jpeg(exif=turned(orientation))
    yield "malformed EXIF", jpeg(exif=b"Exif\x00\x00MM\x00*\x00\x00\x00\xff nothing")
