"""Files of pictures with random damage: to their bytes; and to their parts, with right lengths and checksums, so that
the damage reaches the code behind the checks."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator
from random import Random

from skyrl.base.pictures.picture import PictureFormat
from tests.unit.picture_files import PNG_MAGIC, animation, chunk, kinds_of_jpeg, kinds_of_png, plain, with_scans

SIZES = (0, 1, 2, 7, 255, 8000, 8001, 16_384, 65_535, 2**31 - 1, 2**31, 2**32 - 1)
"""Of pictures and of parts."""
MOST_BYTES = 40_000
"""Of a file that is damaged. It keeps the time of one input below a millisecond."""


def files() -> list[tuple[PictureFormat, bytes]]:
    """One of every kind."""
    pngs = [data for _, data in kinds_of_png()] + [animation(2)]
    jpegs = [data for _, data in kinds_of_jpeg()] + [with_scans(plain(40), 10)]
    found: list[tuple[PictureFormat, bytes]] = [*(("png", data) for data in pngs), *(("jpeg", data) for data in jpegs)]
    return [(format, data) for format, data in found if len(data) < MOST_BYTES]


def damaged(rng: Random, format: PictureFormat, data: bytes) -> bytes:
    """The file with one to three damages."""
    for _ in range(rng.choice((1, 1, 2, 3))):
        parts = _damaged_png if format == "png" else _damaged_jpeg
        data = rng.choice((_damaged_bytes, parts, parts))(rng, data)
    return data


def _damaged_bytes(rng: Random, data: bytes) -> bytes:
    at, length = rng.randrange(len(data) + 1), rng.choice((1, 2, 4, 16, 200))
    kind = rng.choice(("flip", "set", "cut", "drop", "repeat", "insert"))
    if kind == "flip" and at < len(data):
        return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
    if kind == "set":
        return data[:at] + bytes([rng.choice((0, 255, rng.randrange(256)))]) * length + data[at + length :]
    if kind == "cut":
        return data[:at]
    if kind == "drop":
        return data[:at] + data[at + length :]
    if kind == "repeat":
        return data[: at + length] + data[at:]
    return data[:at] + rng.randbytes(length) + data[at:]


def _in_list(rng: Random, parts: list[bytes], change: Callable[[Random, bytes], bytes]) -> bytes:
    """The parts together, of which one is changed, repeated, missing, or at another place."""
    if not parts:
        return rng.randbytes(20)
    at = rng.randrange(len(parts))
    kind = rng.choice(("change", "change", "change", "drop", "repeat", "move"))
    if kind == "change":
        parts[at] = change(rng, parts[at])
    elif kind == "drop":
        del parts[at]
    elif kind == "repeat":
        parts[at:at] = [parts[at]] * rng.choice((1, 50))
    else:
        parts.insert(rng.randrange(len(parts)), parts.pop(at))
    return b"".join(parts)


def _damaged_png(rng: Random, data: bytes) -> bytes:
    return PNG_MAGIC + _in_list(rng, list(_chunks(data)), _changed_chunk)


def _chunks(data: bytes) -> Iterator[bytes]:
    at = len(PNG_MAGIC)
    while at + 12 <= len(data):
        length = int.from_bytes(data[at : at + 4], "big")
        yield data[at : at + 12 + length]
        at += 12 + length


def _changed_chunk(rng: Random, part: bytes) -> bytes:
    """With a right length and checksum."""
    kind, content = part[4:8], part[8:-4]
    if kind == b"IHDR" and len(content) >= 13 and rng.random() < 0.7:
        width, height, *others = struct.unpack(">IIBBBBB", content[:13])
        field = rng.randrange(5)
        if field == 0:
            width = rng.choice(SIZES)
        elif field == 1:
            height = rng.choice(SIZES)
        else:
            others[field - 2] = rng.choice((0, 1, 2, 3, 4, 6, 8, 16, 255))
        return chunk(kind, struct.pack(">IIBBBBB", width, height, *others))
    if kind == b"IDAT" and rng.random() < 0.7:
        try:
            rows = zlib.decompress(content)
        except zlib.error:
            return part
        return chunk(kind, zlib.compress(_damaged_bytes(rng, rows), 1))
    if rng.random() < 0.2:
        kind = rng.choice(
            (b"IDAT", b"IEND", b"PLTE", b"tRNS", b"iCCP", b"zTXt", b"iTXt", b"eXIf", b"acTL", b"fcTL", b"fdAT")
        )
    return chunk(kind, _damaged_bytes(rng, content))


def _damaged_jpeg(rng: Random, data: bytes) -> bytes:
    return _in_list(rng, list(_segments(data)), _changed_segment)


def _segments(data: bytes) -> Iterator[bytes]:
    """Markers with what follows them: the data of a scan are the end of its segment."""
    at = 0
    while at < len(data):
        following = data.find(b"\xff", at + 2)
        while following >= 0 and (data[following + 1 : following + 2] in (b"", b"\x00", b"\xff")):
            following = data.find(b"\xff", following + 1)
        end = len(data) if following < 0 else following
        yield data[at:end]
        at = end


def _changed_segment(rng: Random, part: bytes) -> bytes:
    if part[1:2] in (b"\xc0", b"\xc2") and len(part) > 10 and rng.random() < 0.7:  # the size, precision and components
        at, length = rng.choice(((4, 1), (5, 2), (7, 2), (9, 1)))
        return part[:at] + (rng.choice(SIZES) & (2 ** (8 * length) - 1)).to_bytes(length, "big") + part[at + length :]
    if rng.random() < 0.2:
        return part[:1] + bytes([rng.randrange(256)]) + part[2:]
    return part[:2] + _damaged_bytes(rng, part[2:])
