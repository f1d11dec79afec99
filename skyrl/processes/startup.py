"""Why a process ended before the server was ready for the first time, and whether another start could help.

Knows exit codes and the last lines of logs, of skyrl's own processes and of vLLM. Does not know which processes run,
and decides nothing about a server that has been ready once.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

CANNOT_START = 78
"""Exit code of an engine or API process that cannot start and that no restart cures (EX_CONFIG of sysexits.h)."""
MAY_START = 75
"""Exit code of one that cannot start now but perhaps later: others use the memory, for example (EX_TEMPFAIL)."""
MARK = "cannot start: "
"""Stands before the sentence that says why, in the last line of the log."""
TAIL_LINES = 400
"""So many lines at the end of a log are read; vLLM's list of options alone has 250."""

_BAD_ARGUMENT = re.compile(r"^\S+: error: (.+)$", re.M)
"""The last line of argparse."""
_INVALID = re.compile(r"\bvalidation errors? for \w+\n(.+?)(?: \[type=|\Z)", re.S)
"""A complaint of pydantic's about options of vLLM that argparse has accepted."""
_RAISED = re.compile(r"(?:^|\s)((?:\w+\.)*[A-Z]\w*(?:Error|Exception)): (.+)$", re.M)
_NOT_INSTALLED = re.compile(r"^.*No module named .+\Z", re.M)
"""Python's last line about a module that it is to run. Earlier lines of vLLM's may be warnings about optional ones."""
_NOT_THE_CAUSE = "Engine core initialization failed"
"""vLLM's API server says this after its engine core has ended. The engine core itself has said why."""
_LONGEST = 500


class StartupError(Exception):
    """A server that can never become ready. `log_end` holds the last lines of the log of the process that failed."""

    def __init__(self, sentence: str, log: str = "", log_end: str = "") -> None:
        super().__init__(sentence)
        self.log = log
        self.log_end = log_end


class NotLoaded(Exception):
    """Something that a process needs could not be loaded now. Another start may load it."""


@dataclass(frozen=True)
class Cause:
    """Why a process ended, in a sentence; `final`: no restart cures it."""

    sentence: str
    final: bool


def cause_of_own(code: int, tail: str) -> Cause | None:
    """Why the engine or an API process has ended, by its exit code and the end of its log. None when it gave neither
    sign that it cannot start."""
    if code not in (CANNOT_START, MAY_START) or MARK not in tail:
        return None
    return Cause(tail.rpartition(MARK)[2].partition("\n")[0], code == CANNOT_START)


def cause_of_vllm(code: int, tail: str) -> Cause | None:
    """Why vLLM has ended. None when it was killed, or when its log holds nothing that looks like a cause."""
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
    """Remembers how processes ended before the server was ready.

    A cause that is not final counts as final when a process ends of it twice in a row. Sentences are compared without
    their numbers, which are process ids and amounts of memory.
    """

    def __init__(self) -> None:
        self.last: dict[str, str] = {}
        """By process: the sentence of its last end."""

    def hopeless(self, process: str, cause: Cause | None) -> bool:
        """Note the end of a process. Says whether no further start can be expected to go better."""
        before = self.last.pop(process, None)
        if cause is None:
            return False
        self.last[process] = cause.sentence
        return cause.final or (before is not None and _without_numbers(before) == _without_numbers(cause.sentence))


def _without_numbers(text: str) -> str:
    return re.sub(r"\d+", "#", text)
