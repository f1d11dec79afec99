"""Tar archives of stored files as streams: an archive is never whole in memory or on disk, and its size is known first.

Weights hardly compress. Therefore the gzip form does not compress the tar: it stores it in blocks and adds a checksum,
so that its size is known first, too.
"""

from __future__ import annotations

import struct
import tarfile
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

_BLOCK = tarfile.BLOCKSIZE
_END = bytes(2 * _BLOCK)
_STORED_MAX = 65_535
_GZIP_HEADER = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\xff"
_GZIP_LAST = b"\x01\x00\x00\xff\xff"
"""An empty stored block, marked as the last one."""


@dataclass(frozen=True)
class Member:
    """A file of an archive. `pieces` yield exactly `size` bytes."""

    name: str
    size: int
    pieces: Iterable[bytes]


def tar_size(sizes: Iterable[int]) -> int:
    """Bytes of a tar with files of these sizes."""
    return sum(_BLOCK + size + -size % _BLOCK for size in sizes) + len(_END)


def tar(members: Iterable[Member], modified_at: float) -> Iterator[bytes]:
    """The archive in pieces. Raises ValueError when a member does not yield `size` bytes."""
    for member in members:
        header = tarfile.TarInfo(member.name)
        header.size, header.mtime = member.size, int(modified_at)
        yield header.tobuf(tarfile.GNU_FORMAT)
        sent = 0
        for piece in member.pieces:
            sent += len(piece)
            yield piece
        if sent != member.size:
            raise ValueError(f"{member.name} has {sent} bytes, not {member.size}")
        yield bytes(-member.size % _BLOCK)
    yield _END


def gzip_size(size: int) -> int:
    """Bytes of the output of `gzip_stored` for `size` bytes of input."""
    return len(_GZIP_HEADER) + size + 5 * -(-size // _STORED_MAX) + len(_GZIP_LAST) + 8


def gzip_stored(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """A gzip file that holds these bytes uncompressed (RFC 1951, 3.2.4), in pieces."""
    yield _GZIP_HEADER
    checksum = size = 0
    buffer = b""
    for piece in pieces:
        checksum, size = zlib.crc32(piece, checksum), size + len(piece)
        buffer += piece
        full_blocks = len(buffer) - len(buffer) % _STORED_MAX
        for start in range(0, full_blocks, _STORED_MAX):
            yield _stored_block(buffer[start : start + _STORED_MAX])
        buffer = buffer[full_blocks:]
    if buffer:
        yield _stored_block(buffer)
    yield _GZIP_LAST + struct.pack("<LL", checksum, size & 0xFFFFFFFF)


def _stored_block(data: bytes) -> bytes:
    return struct.pack("<BHH", 0, len(data), len(data) ^ 0xFFFF) + data
