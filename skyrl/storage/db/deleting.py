"""How much one statement deletes, so that no other transaction waits long for it."""

from __future__ import annotations

from collections.abc import Iterable

FORGET_BYTES = 4 * 2**20


def within(rows: Iterable[tuple[int, int]]) -> list[int]:
    """The numbers of the first rows that have FORGET_BYTES together, or of all. `rows`: their numbers and bytes."""
    numbers: list[int] = []
    total_bytes = 0
    for number, row_bytes in rows:
        numbers.append(number)
        total_bytes += row_bytes
        if total_bytes >= FORGET_BYTES:
            break
    return numbers
