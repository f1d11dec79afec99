"""Shows the start of a server: in a live line on a terminal, in log lines elsewhere.

Asks `/readyz` why the server is not ready. The caller says which processes run and since when.
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
"""The first and the longest pause between two requests to `/readyz`. The pauses grow, because an external inference
server may be down for days."""
LIVE_LOOK_S = 1.0
"""The longest pause while there is a live line, which shows how long the start takes."""
SAY_S = 30.0
"""How often the log says what is missing."""
_CLEAR_LINE = "\r\x1b[2K"
_PROCESSES_OF = {"training": ("engine",), "sampling": ("vllm", "placement")}
"""By the first word of a reason of `/readyz`: the process that the reason is about, or the beginning of the names of
several. Vllms on a Ray cluster are the placement process's."""
READY = "ready"
"""The stage of a process for which `/readyz` gives no reason."""
_UNPUBLISHED = "no inference server has been published"
"""The reason that `/readyz` gives while vLLM starts."""


def stages(names: Sequence[str], reasons: Sequence[str] | None, running_s: Mapping[str, float]) -> dict[str, str]:
    """The stage of each process, by name. `reasons` are those of `/readyz`, None while the API does not answer.
    `running_s` has the seconds since each running process was started."""
    reason_of = {word: rest for word, _, rest in (reason.partition(": ") for reason in reasons or ())}
    stage_of: dict[str, str] = {}
    for name in names:
        words = (word for word, processes in _PROCESSES_OF.items() if name.partition("-")[0] in processes)
        reason = next((reason_of[word] for word in words if word in reason_of), None)
        if reason is None and reasons is not None:
            stage_of[name] = READY
        elif name not in running_s:
            stage_of[name] = "ended, starts again"
        elif reason is None or reason == _UNPUBLISHED:
            stage_of[name] = f"starting ({running_s[name]:.0f} s)"
        else:
            stage_of[name] = f"{reason} ({running_s[name]:.0f} s)"
    runs_vllm = any(name.partition("-")[0] in _PROCESSES_OF["sampling"] for name in names)
    if "sampling" in reason_of and not runs_vllm:  # an external inference server
        stage_of["inference server"] = reason_of["sampling"]
    return stage_of


class _AboveTheLine:
    """Replaces a stream while the live line is at its end. Written text appears above that line."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.line = ""

    def write(self, text: str) -> None:
        self._stream.write(f"{_CLEAR_LINE}{text}{self.line}")

    def flush(self) -> None:
        self._stream.flush()


class Progress:
    """Shows stages until `close`. While there is a live line, log lines appear above it."""

    def __init__(self, stream: TextIO) -> None:
        self.live = stream.isatty() and os.environ.get("TERM") != "dumb"
        self._above = _AboveTheLine(stream)
        self._logged_stage: dict[str, str] = {}
        """By process."""
        self._handlers: list[logging.StreamHandler[Any]] = []
        if self.live:
            for handler in logging.getLogger().handlers:
                if isinstance(handler, logging.StreamHandler) and handler.stream is stream:
                    handler.setStream(self._above)
                    self._handlers.append(handler)
        self._stream = stream

    def show(self, stage_of: Mapping[str, str]) -> None:
        """On a terminal show all stages in one line. Elsewhere log each stage that has changed."""
        if self.live:
            columns = shutil.get_terminal_size().columns
            self._above.line = "  ".join(f"{name}: {stage}" for name, stage in stage_of.items())[: columns - 1]
            self._above.write("")
            self._above.flush()
            return
        for name, stage in stage_of.items():
            without_time = stage.partition(" (")[0]
            if self._logged_stage.get(name) != without_time:
                self._logged_stage[name] = without_time
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
    stages_of: Callable[[list[str] | None], Mapping[str, str]],
    missing: Callable[[list[str] | None], str],
) -> list[str]:
    """Return when the server at `url` is ready, with the reasons that a ready server gives, such as a replica that is
    still starting. Until then show the stages of its processes, and log every SAY_S seconds what is missing.
    `stages_of` and `missing` get the reasons of `/readyz`, None while the API does not answer."""
    logged_at = time.monotonic()
    pause_s = FIRST_LOOK_S
    progress = Progress(sys.stderr)
    try:
        async with httpx.AsyncClient(trust_env=False, timeout=5.0) as client:
            while True:
                ready, reasons = await _reasons(client, url)
                if ready:
                    return reasons or []
                progress.show(stages_of(reasons))
                if time.monotonic() - logged_at > SAY_S:
                    logged_at = time.monotonic()
                    logger.info("not ready yet: %s", missing(reasons))
                await asyncio.sleep(pause_s)
                pause_s = min(1.05 * pause_s, LIVE_LOOK_S if progress.live else LONGEST_LOOK_S)
    finally:
        progress.close()


async def _reasons(client: httpx.AsyncClient, url: str) -> tuple[bool, list[str] | None]:
    """Whether the server is ready, and what is missing: None while the API does not answer."""
    try:
        answer = await client.get(f"{url}/readyz")
    except httpx.RequestError:
        return False, None
    if answer.status_code == httpx.codes.OK:
        return True, answer.json().get("reasons", [])
    if answer.status_code == httpx.codes.SERVICE_UNAVAILABLE:
        return False, answer.json().get("reasons") or ["the API cannot say what is missing"]
    return False, [f"the API answers /readyz with {answer.status_code}"]
