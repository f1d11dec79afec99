"""Why a process ended before the server was ready for the first time, and whether another start could help.

The engine keeps what it runs now in a file (`skyrl.engine.crash_ledger` writes it), so that the launcher can
say what it ran when it died.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CANNOT_START = 78
"""Exit code of an engine or API process that cannot start, however often it is tried (EX_CONFIG of sysexits.h)."""
MAY_START = 75
"""Exit code of an engine or API process that cannot start now but perhaps later, for example because other programs use
the memory (EX_TEMPFAIL)."""
MARK = "cannot start: "
"""In the last line of the log: comes before the sentence that says why the process cannot start."""
TAIL_LINES = 400
"""How many lines at the end of a log are searched for a cause. vLLM's list of options alone has 250 lines."""

_BAD_ARGUMENT = re.compile(r"^\S+: error: (.+)$", re.M)
"""The last line of argparse."""
_INVALID = re.compile(r"\bvalidation errors? for \w+\n(.+?)(?: \[type=|\Z)", re.S)
"""Pydantic's message about options of vLLM that argparse has accepted."""
_RAISED = re.compile(r"(?:^|\s)((?:\w+\.)*[A-Z]\w*(?:Error|Exception)): (.+?: *(?:\n \S.*)+|.+)$", re.M)
"""An exception's name and message. A line that ends with a colon goes on in lines that begin with one space: so vLLM
says why each of its kernels cannot be used."""
_NOT_INSTALLED = re.compile(r"^.*No module named .+\Z", re.M)
"""Python's last line when the module that it shall run is missing. The same words in earlier lines may be vLLM's
warnings about optional modules."""
_NOT_THE_CAUSE = "Engine core initialization failed"
"""vLLM's API server logs this after its engine core has ended. The engine core has logged the cause before."""
_MAX_SENTENCE = 500
"""Characters."""


class StartupError(Exception):
    """A server that can never become ready. `log_end` holds the last lines of the log of the process that failed."""

    def __init__(self, sentence: str, log: str = "", log_end: str = "") -> None:
        super().__init__(sentence)
        self.log = log
        self.log_end = log_end


class NotLoaded(Exception):
    """The base model could not be loaded now. Another start may load it."""


@dataclass(frozen=True)
class Cause:
    """Why a process ended, in a sentence. `final`: every further start would end the same way."""

    sentence: str
    final: bool


def cause_of_own(code: int, tail: str) -> Cause | None:
    """Why the engine or an API process has ended. None unless both its exit code and `tail`, the end of its log, say
    that it cannot start."""
    if code not in (CANNOT_START, MAY_START) or MARK not in tail:
        return None
    return Cause(tail.rpartition(MARK)[2].partition("\n")[0], code == CANNOT_START)


def cause_of_vllm(code: int, tail: str) -> Cause | None:
    """Why vLLM has ended. None when a signal ended it, or when no cause is found in `tail`, the end of its log."""
    if code < 0:
        return None
    if bad_argument := _BAD_ARGUMENT.findall(tail):
        return Cause(_short(bad_argument[-1]), final=True)
    if missing := _NOT_INSTALLED.search(tail.rstrip()):
        return Cause(_short(missing[0]), final=True)
    if invalid := _INVALID.findall(tail):
        return Cause(_short(invalid[-1].replace("Value error, ", "").strip()), final=True)
    raised = [f"{name}: {message}" for name, message in _RAISED.findall(tail) if _NOT_THE_CAUSE not in message]
    return Cause(_short(raised[-1]), final=raised[-1].startswith("ModuleNotFoundError")) if raised else None


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _MAX_SENTENCE else f"{line[:_MAX_SENTENCE]}..."


class FirstStarts:
    """Remembers why processes ended before the server was ready.

    A start is hopeless after a final cause, and after the same cause twice in a row. The sentences of two causes are
    compared without their numbers, because these are process ids and amounts of memory.
    """

    def __init__(self) -> None:
        self._last_sentence: dict[str, str] = {}
        """By process."""

    def hopeless(self, process: str, cause: Cause | None) -> bool:
        """Remember why a process has ended. Returns whether another start of it is hopeless."""
        last = self._last_sentence.pop(process, None)
        if cause is None:
            return False
        self._last_sentence[process] = cause.sentence
        return cause.final or (last is not None and _without_numbers(last) == _without_numbers(cause.sentence))


def _without_numbers(text: str) -> str:
    return re.sub(r"\d+", "#", text)


def read_running_file(file: Path) -> dict[str, Any]:
    """`running`: the keys that ran when the file was written; `deaths`: the engine's deaths, by key.

    Raises FileNotFoundError, and ValueError for a damaged file. After the first line the file may hold the rest of a
    longer one.
    """
    found = json.loads(file.read_text().partition("\n")[0])
    if not isinstance(found, dict) or not {"running", "deaths"} <= found.keys():
        raise ValueError(f"{file} has other content")
    return found


def running_now(file: Path) -> list[str]:
    """The keys that ran when the file was last written; none if it is missing or damaged."""
    try:
        return [str(key) for key in read_running_file(file)["running"]]
    except (OSError, ValueError):
        return []
