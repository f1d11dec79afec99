"""Decodes base64 of any length without keeping the other threads of the process waiting.

Python decodes a text in one call, in which no other thread runs: 2 ms for each million characters, and a picture may
have 27 million.
"""

from __future__ import annotations

import binascii

PIECE = 2**20
"""Characters that are decoded at once."""


def decode_base64(text: str) -> bytes:
    """Raises ValueError for anything but RFC 4648's base64 with its padding."""
    if len(text) % 4 or text.find("=", 0, len(text) - 2) >= 0:
        raise ValueError("incorrect padding")
    pieces = (text[start : start + PIECE] for start in range(0, len(text), PIECE))
    return b"".join(binascii.a2b_base64(piece, strict_mode=True) for piece in pieces)
