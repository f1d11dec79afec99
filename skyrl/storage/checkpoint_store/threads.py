"""Threads for calls of a checkpoint store. A store that hangs then blocks no thread that other work needs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")

_THREADS = ThreadPoolExecutor(8, thread_name_prefix="checkpoint-store")


async def in_store(action: Callable[..., T], *arguments: Any) -> T:
    """`asyncio.to_thread` for methods of a CheckpointStore, and for functions that call them."""
    return await asyncio.get_running_loop().run_in_executor(_THREADS, action, *arguments)
