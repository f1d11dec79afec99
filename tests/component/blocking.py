"""A guard for event loops. The guard records every call by which a coroutine or callback of skyrl waits for the
database or for another thread on a thread that runs an event loop. During such a wait the loop does nothing else: it
handles no signal and answers no poll.

The guard checks the caller and measures no time, so a busy machine does not change the result.
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
from skyrl.storage.db.database import Database

SKYRL_DIRECTORY = str(Path(skyrl.__file__).parent)
BLOCKING_CALLS: list[tuple[Any, str]] = [
    (Database, "read"),
    (Database, "write"),
    (time, "sleep"),
    (threading.Thread, "join"),
    (concurrent.futures.Future, "result"),
]


def _is_on_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _is_called_by_skyrl(frame: FrameType | None) -> bool:
    """Whether a coroutine or callback of skyrl made the call, and not a test that calls a function of skyrl directly.
    The nearest coroutine on the stack decides; without one, the function that the loop has called decides."""
    last = frame
    while frame is not None:
        if "/asyncio/" in frame.f_code.co_filename:
            break
        last = frame
        if frame.f_code.co_flags & (inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR):
            break
        frame = frame.f_back
    return last is not None and last.f_code.co_filename.startswith(SKYRL_DIRECTORY)


@contextmanager
def noted_waits() -> Iterator[list[str]]:
    """The calls that waited on the thread of a loop, each with its stack."""
    found: list[str] = []

    def guarded(original: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if _is_on_event_loop() and _is_called_by_skyrl(sys._getframe(1)) and not _has_ended(arguments):
                found.append(f"{name} was called on an event loop:\n{''.join(traceback.format_stack(limit=8)[:-1])}")
            return original(*arguments, **options)

        return call

    with ExitStack() as patches:
        for owner, name in BLOCKING_CALLS:
            original = getattr(owner, name)
            patches.enter_context(mock.patch.object(owner, name, guarded(original, f"{owner.__name__}.{name}")))
        yield found


def _has_ended(arguments: tuple[Any, ...]) -> bool:
    """A call on a finished future or thread does not wait."""
    match arguments:
        case (concurrent.futures.Future() as future, *_):
            return future.done()
        case (threading.Thread() as thread, *_):
            return not thread.is_alive()
        case _:
            return False
