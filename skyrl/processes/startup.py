"""Why a process ended before the server was ready for the first time, and whether another start could help.

Knows exit codes and the last lines of logs: those of skyrl's own processes, and those of vLLM. Does not know what is
running, and decides nothing about a server that has been ready once.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

CANNOT_START = 78
"""Exit code of the engine or an API process that found a cause which no restart cures (EX_CONFIG of sysexits.h)."""
MAY_START = 75
"""Exit code of one that could not start for a cause that may pass: memory that others use now (EX_TEMPFAIL)."""
MARK = "cannot start: "
"""Goes before the sentence, in the last line of the log."""
TAIL_LINES = 400
"""So much of a log's end is looked at; vLLM's list of options alone has 250 lines."""

_BAD_ARGUMENT = re.compile(r"^\S+: error: (.+)$", re.M)
"""The last line of argparse."""
_INVALID = re.compile(r"\bvalidation errors? for \w+\n(.+?)(?: \[type=|\Z)", re.S)
"""What pydantic found in options of vLLM that argparse took."""
_RAISED = re.compile(r"(?:^|\s)((?:\w+\.)*[A-Z]\w*(?:Error|Exception)): (.+)$", re.M)
_NOT_INSTALLED = re.compile(r"^.*No module named .+\Z", re.M)
"""Python's last line about a module that it is to run. Earlier lines of vLLM's may be warnings about optional ones."""
_NOT_THE_CAUSE = "Engine core initialization failed"
"""vLLM's API server says this of an engine core that has said why itself."""
_LONGEST = 500


class StartupError(Exception):
    """A server that can never become ready. `log_end` holds the last lines of the log of the process that failed."""

    def __init__(self, sentence: str, log: str = "", log_end: str = "") -> None:
        super().__init__(sentence)
        self.log = log
        self.log_end = log_end


class NotLoaded(Exception):
    """What a process needs could not be loaded, for a cause that may pass."""


@dataclass(frozen=True)
class Cause:
    """Why a process ended, in a sentence; `final`: no restart cures it."""

    sentence: str
    final: bool


def cause_of_own(code: int, tail: str) -> Cause | None:
    """Of the engine or an API process, by its exit code and its log's end. None: it did not end by starting."""
    if code not in (CANNOT_START, MAY_START) or MARK not in tail:
        return None
    return Cause(tail.rpartition(MARK)[2].partition("\n")[0], code == CANNOT_START)


def cause_of_vllm(code: int, tail: str) -> Cause | None:
    """Of vLLM. None: it was killed, or said nothing that looks like a cause."""
    if code < 0:
        return None
    if bad := _BAD_ARGUMENT.findall(tail):
        return Cause(_short(bad[-1]), final=True)
    if missing := _NOT_INSTALLED.search(tail.rstrip()):
        return Cause(_short(missing[0]), final=True)
    if invalid := _INVALID.findall(tail):
        return Cause(_short(invalid[-1].replace("Value error, ", "").strip()), final=True)
    raised = [f"{name}: {said}" for name, said in _RAISED.findall(tail) if _NOT_THE_CAUSE not in said]
    return Cause(_short(raised[-1]), final=raised[-1].startswith("ModuleNotFoundError")) if raised else None


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]}..."


class FirstStarts:
    """Counts how processes ended before the server was ready.

    A cause that may pass is taken for final when a process ends of it twice in a row. Numbers in the sentences are not
    compared: they hold process ids and amounts of memory.
    """

    def __init__(self) -> None:
        self.last: dict[str, str] = {}
        """By process: what it ended of, last."""

    def hopeless(self, process: str, cause: Cause | None) -> bool:
        """Note the end of a process. Whether no further start can be expected to go better."""
        before = self.last.pop(process, None)
        if cause is None:
            return False
        self.last[process] = cause.sentence
        return cause.final or (before is not None and _without_numbers(before) == _without_numbers(cause.sentence))


def _without_numbers(text: str) -> str:
    return re.sub(r"\d+", "#", text)
