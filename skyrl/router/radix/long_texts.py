"""What long texts cost is paid in threads, so that other clients' requests do not wait.

C code that makes one long list or one long JSON text does not let the event loop run meanwhile, in whichever thread it
is. So long arrays are written in pieces.
"""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

import msgspec

INLINE_BYTES = 64 * 2**10
"""Bodies up to this size are read and tokenised on the event loop: the way to a thread and back costs more."""
THREADS = 2
"""Long texts at a time. The others wait, in the order of their arrival."""
_PIECE = 2**14
P = ParamSpec("P")
T = TypeVar("T")


class Threads:
    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(THREADS, thread_name_prefix="radix")

    async def run(self, size: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What `work` returns or raises. `size`: the bytes that it works on. It must not touch the cache."""
        if size <= INLINE_BYTES:
            return work(*args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._executor, lambda: work(*args, **kwargs))


def with_arrays(fields: Mapping[str, Any], arrays: Mapping[str, array[Any] | bytearray]) -> bytes:
    """JSON of an object with these fields, and these arrays of numbers. Raises UnicodeEncodeError for text that is not
    valid Unicode."""
    parts = [json.dumps(dict(fields), ensure_ascii=False, separators=(",", ":")).encode()[:-1]]
    for name, numbers in arrays.items():
        comma = b"," if fields or len(parts) > 1 else b""
        parts += [comma, json.dumps(name).encode(), b":[", b",".join(_pieces(numbers)), b"]"]
    return b"".join([*parts, b"}"])


def _pieces(numbers: array[Any] | bytearray) -> list[bytes]:
    starts = range(0, len(numbers), _PIECE)
    return [msgspec.json.encode(list(numbers[start : start + _PIECE]))[1:-1] for start in starts]
