"""What the console shows while a server starts: a live line on a terminal, log lines elsewhere.

Knows terminals, and `/readyz` with its reasons. Does not know processes: callers say how long each has run.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO

import httpx

logger = logging.getLogger(__name__)

FIRST_LOOK_S, LONGEST_LOOK_S = 0.2, 10.0
"""Seconds between two questions whether the server is ready. They grow: an external inference server may be away for
days."""
LIVE_LOOK_S = 1.0
"""The longest of these pauses while a live line on a terminal shows how long the start takes."""
SAY_S = 30.0
"""How often the log says what is missing."""
_CLEAR = "\r\x1b[2K"
_PARTS = {"training": "engine", "sampling": "vllm"}
"""The process that a reason of `/readyz` is about, by the reason's first word."""
READY = "ready"
"""The stage of a process for which `/readyz` gives no reason."""
_UNPUBLISHED = "no inference server has been published"
"""The reason that `/readyz` gives while vLLM starts."""


def stages(names: Sequence[str], reasons: Sequence[str] | None, running_s: Mapping[str, float]) -> dict[str, str]:
    """What each process does, by name. `reasons` are those of `/readyz`, None while the API does not answer.
    `running_s` has the seconds since each process that runs was started."""
    told = {word: rest for word, _, rest in (reason.partition(": ") for reason in reasons or ())}
    doing: dict[str, str] = {}
    for name in names:
        reason = next((told[word] for word, part in _PARTS.items() if part == name and word in told), None)
        waits = reason is not None or reasons is None
        if not waits:
            doing[name] = READY
        elif name not in running_s:
            doing[name] = "ended, starts again"
        elif reason is None or reason == _UNPUBLISHED:
            doing[name] = f"starting ({running_s[name]:.0f} s)"
        else:
            doing[name] = f"{reason} ({running_s[name]:.0f} s)"
    if "vllm" not in names and "sampling" in told:  # somebody else's inference server
        doing["inference server"] = told["sampling"]
    return doing


class _AboveTheLine:
    """Replaces a stream that has a live line at its end. Text that is written appears above that line."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.line = ""

    def write(self, text: str) -> None:
        self._stream.write(f"{_CLEAR}{text}{self.line}")

    def flush(self) -> None:
        self._stream.flush()


class Progress:
    """Shows stages until `close`. While a live line is on the terminal, the log goes above it."""

    def __init__(self, stream: TextIO) -> None:
        self.live = stream.isatty() and os.environ.get("TERM") != "dumb"
        self._above = _AboveTheLine(stream)
        self._before: dict[str, str] = {}
        self._handlers: list[logging.StreamHandler[Any]] = []
        if self.live:
            for handler in logging.getLogger().handlers:
                if isinstance(handler, logging.StreamHandler) and handler.stream is stream:
                    handler.setStream(self._above)
                    self._handlers.append(handler)
        self._stream = stream

    def show(self, doing: Mapping[str, str]) -> None:
        """On a terminal show all stages in one line. Elsewhere log each stage that has changed."""
        if self.live:
            columns = shutil.get_terminal_size().columns
            self._above.line = "  ".join(f"{name}: {stage}" for name, stage in doing.items())[: columns - 1]
            self._above.write("")
            self._above.flush()
            return
        for name, stage in doing.items():
            without_time = stage.partition(" (")[0]
            if self._before.get(name) != without_time:
                self._before[name] = without_time
                logger.info("%s: %s", name, without_time)

    def close(self) -> None:
        """Remove the live line, and give the log its stream back."""
        if not self.live:
            return
        self._above.line = ""
        self._above.write("")
        self._above.flush()
        for handler in self._handlers:
            handler.setStream(self._stream)
        self._handlers.clear()


async def until_ready(
    url: str,
    doing: Callable[[list[str] | None], Mapping[str, str]],
    missing: Callable[[list[str] | None], str],
) -> None:
    """Return when the server at `url` is ready. Until then show what its processes are `doing`, and log every SAY_S
    seconds what is `missing`. Both get the reasons of `/readyz`, None while the API does not answer."""
    said = time.monotonic()
    pause_s = FIRST_LOOK_S
    progress = Progress(sys.stderr)
    try:
        async with httpx.AsyncClient(trust_env=False, timeout=5.0) as client:
            while (reasons := await _reasons(client, url)) != []:
                progress.show(doing(reasons))
                if time.monotonic() - said > SAY_S:
                    said = time.monotonic()
                    logger.info("not ready yet: %s", missing(reasons))
                await asyncio.sleep(pause_s)
                pause_s = min(1.05 * pause_s, LIVE_LOOK_S if progress.live else LONGEST_LOOK_S)
    finally:
        progress.close()


async def _reasons(client: httpx.AsyncClient, url: str) -> list[str] | None:
    """Why the server is not ready: empty when it is, None while the API does not answer."""
    try:
        answer = await client.get(f"{url}/readyz")
    except httpx.RequestError:
        return None
    if answer.status_code == httpx.codes.OK:
        return []
    if answer.status_code == httpx.codes.SERVICE_UNAVAILABLE:
        return answer.json().get("reasons") or ["the API cannot say what is missing"]
    return [f"the API answers /readyz with {answer.status_code}"]
