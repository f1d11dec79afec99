"""What the tests of a running launcher look at."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from skyrl.base.config.server import ServerConfig

WAIT_S = 120.0


def log_of(config: ServerConfig, name: str) -> str:
    """The log of a process so far."""
    file = config.state_dir / "logs" / f"{name}.log"
    return file.read_text() if file.exists() else ""


async def wait_until(condition: Callable[[], object], running: asyncio.Task[None]) -> None:
    """Wait while the launcher runs."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert not running.done(), running
        assert time.monotonic() < deadline, "the condition did not hold in time"
        await asyncio.sleep(0.02)
