"""A guard for event loops: it notes each call that waits for the database, or for another thread, and is made by our
own coroutines on a thread that runs a loop. While such a call waits, nothing else runs there: no signal is heard, no
poll is answered.

It looks at who calls and not at a clock, so a busy machine makes no difference.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import skyrl
from skyrl.db.database import Database

OURS = str(Path(skyrl.__file__).parent)
WAITS: list[tuple[Any, str]] = [
    (Database, "read"),
    (Database, "write"),
    (time, "sleep"),
    (threading.Thread, "join"),
    (concurrent.futures.Future, "result"),
]


def _on_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _is_ours(frame: FrameType | None) -> bool:
    """Whether the call was made by one of skyrl's coroutines or callbacks, and not by a test that calls a function of
    skyrl's by itself: whose is the nearest coroutine, or else the function that the loop has called?"""
    last = frame
    while frame is not None:
        if "/asyncio/" in frame.f_code.co_filename:
            break
        last = frame
        if frame.f_code.co_flags & (inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR):
            break
        frame = frame.f_back
    return last is not None and last.f_code.co_filename.startswith(OURS)


@contextmanager
def noted_waits() -> Iterator[list[str]]:
    """The calls that waited on a loop's thread, each with its stack."""
    found: list[str] = []

    def guarded(really: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*given: Any, **options: Any) -> Any:
            if _on_a_loop() and _is_ours(sys._getframe(1)) and not _has_ended(given):
                found.append(f"{name} was called on an event loop:\n{''.join(traceback.format_stack(limit=8)[:-1])}")
            return really(*given, **options)

        return call

    with ExitStack() as patches:
        for owner, name in WAITS:
            really = getattr(owner, name)
            patches.enter_context(mock.patch.object(owner, name, guarded(really, f"{owner.__name__}.{name}")))
        yield found


def _has_ended(given: tuple[Any, ...]) -> bool:
    """A future that has its result, or a thread that has ended, is not waited for."""
    match given:
        case (concurrent.futures.Future() as future, *_):
            return future.done()
        case (threading.Thread() as thread, *_):
            return not thread.is_alive()
        case _:
            return False
