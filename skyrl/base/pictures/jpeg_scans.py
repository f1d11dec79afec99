"""Counts the scans of a JPEG file. Each scan of a progressive file passes over the entire picture, and may take a few
bytes: without a bound, a small file keeps the decoder busy for hours."""

from __future__ import annotations

import re

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
