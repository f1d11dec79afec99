"""Runs the blocks of one page in order, as a reader who types them into one terminal.

Commands are the real ones, with three exceptions: `skyrl serve` reads its options and configuration and starts nothing
(`tests.e2e.page_programs`), `make` only checks that the target exists, and `sudo` runs its command as this user. Paths
and addresses of the pages are replaced by those of the test.
"""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from tests.e2e.page_programs import PROGRAMS, command
from tests.pages import ROOT, Command

MAKE = f"""#!/bin/sh
[ "$1" = -C ] && shift 2
exec /usr/bin/env -u MAKEFLAGS PATH="$REAL_PATH" make -C {ROOT} --dry-run "$@" >/dev/null
"""

SUDO = """#!/bin/sh
[ "$1" = -u ] && shift 2
exec "$@"
"""

TIMEOUT_S = 400.0
"""Ends a hanging command."""

_VARYING = re.compile(r"(\.\.\.|\b[0-9a-f]{12,}\b|\d+|\s+)")
"""The parts of an output that differ each time: omitted text, identifiers, numbers, and the width of columns."""


class PageFailed(AssertionError):
    """A command of a page failed, or its output differs from the page."""


@dataclass
class Terminal:
    """A shell in its own directory. The directory and exported variables last from one command to the next.

    `names` maps texts of the pages to the texts of this test. Identifiers in the output that a page shows are added
    once the real identifiers are known, so that later commands use the real ones.
    """

    home: Path
    address: Path
    """The address at which `tests.e2e.page_programs` runs programs."""
    variables: dict[str, str]
    names: dict[str, str]
    typed: dict[str, str] = field(default_factory=dict)
    """The input for a command that contains this word."""
    work: Path = field(init=False)
    """The directory of the terminal."""

    def __post_init__(self) -> None:
        programs = self.home / "bin"
        programs.mkdir(parents=True)
        started = {name: f'#!/bin/sh\nexec {shlex.join(command(self.address, name))} "$@"\n' for name in PROGRAMS}
        for name, text in {**started, "make": MAKE, "sudo": SUDO}.items():
            (programs / name).write_text(text)
            (programs / name).chmod(0o755)
        self.work = self.home / "work"
        self.work.mkdir()
        path = os.pathsep.join([str(programs), str(Path(sys.executable).parent), os.environ["PATH"]])
        keep = {name: os.environ[name] for name in ("LANG", "HF_HUB_OFFLINE", "OMP_NUM_THREADS") if name in os.environ}
        start = {"HOME": str(self.home), "PATH": path, "REAL_PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}
        self._environment = keep | start | self.variables

    def add_programs(self, directory: Path) -> None:
        """Put this directory before all others on the PATH."""
        self._environment["PATH"] = f"{directory}{os.pathsep}{self._environment['PATH']}"

    def real(self, text: str) -> str:
        """The text of a page with the names of this test."""
        for name in sorted(self.names, key=len, reverse=True):
            text = text.replace(name, self.names[name])
        return text

    def run(self, shown: Command) -> None:
        """Raises PageFailed."""
        text = self.real(shown.text)
        after = self.home / "after"
        script = f'set -e\n{text}\nset +x; {{ pwd; env -0; }} > "{after}"'
        typed = next((typed for word, typed in self.typed.items() if word in text), "")
        done = subprocess.run(
            ["bash", "-c", script],
            cwd=self.work,
            env=self._environment,
            input=typed,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        output = done.stdout + done.stderr
        if done.returncode != 0:
            raise PageFailed(f"$ {text}\n{output}\nended with {done.returncode}")
        where, _, variables = after.read_text().partition("\n")
        self.work = Path(where)
        self._environment = dict(line.split("=", 1) for line in variables.split("\0") if "=" in line)
        for line in shown.output:
            self._compare(line, output, text)

    def _compare(self, line: str, output: str, text: str) -> None:
        parts = _VARYING.split(self.real(line).strip())
        found = re.search("".join(_pattern(part) for part in parts), output)
        if found is None:
            raise PageFailed(f"$ {text}\n{output}\nThe page shows a line that is not there: {line}")
        shown = [part for part in parts if re.fullmatch(r"[0-9a-f]{12,}", part)]
        for name, real in zip(shown, found.groups(), strict=True):
            self.names[name] = real


def _pattern(part: str) -> str:
    if part == "...":
        return ".*"
    if re.fullmatch(r"[0-9a-f]{12,}", part):
        return r"\b([0-9a-f]{12,})\b"
    if part.isdecimal():
        return r"\d+"
    return r"\s+" if part.isspace() else re.escape(part)


def run_python(texts: list[str], terminal: Terminal) -> None:
    """Run the python blocks of a page in one process, so that each block sees the names of earlier blocks.

    Raises PageFailed.
    """
    script = terminal.home / "page.py"
    script.write_text(f"from {__name__} import execute\nexecute({[terminal.real(text) for text in texts]!r})\n")
    terminal.run(Command(f"script {script}"))


def execute(texts: list[str]) -> None:
    """Run the blocks as a notebook does: a block with `await` runs in an event loop, other blocks do not."""
    import ast
    import inspect

    names: dict[str, object] = {"__name__": "__main__"}
    loop = asyncio.new_event_loop()
    for number, text in enumerate(texts):
        code = compile(text, f"block {number + 1}", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        if code.co_flags & inspect.CO_COROUTINE:
            loop.run_until_complete(eval(code, names))
        else:
            exec(code, names)
    loop.close()
