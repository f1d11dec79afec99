"""Reads the fenced blocks of the pages: their text, their commands, and whether a test can run them.

A page marks a block that no test can run with a comment on the line before: `<!-- not run: why -->`. The comment does
not show on the page. This module knows the form of the pages and runs nothing.
"""

from __future__ import annotations

import re
import shlex
import textwrap
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]

RUN_PAGES = [
    "README.md",
    "docs/quickstart.md",
    "docs/operating.md",
    *sorted(f"docs/{path.relative_to(ROOT / 'docs')}" for path in (ROOT / "docs/howto").glob("*.md")),
    *sorted(f"docs/{path.relative_to(ROOT / 'docs')}" for path in (ROOT / "docs/operating").glob("*.md")),
]
"""Pages whose commands a test runs (`tests/e2e/test_pages.py`)."""

SHELL = ("bash", "console")
PROGRAMS = (*SHELL, "python", "sql")
"""Languages of blocks that a test runs unless the page marks them."""

SETTINGS = ("toml", "yaml", "nginx", "logrotate")
"""Languages of blocks that a test checks as far as the machine allows."""

OUTPUT = ("text", "json")

_FENCE = re.compile(r"^ *```(\w*)$")
_NOT_RUN = re.compile(r"^ *<!-- not run: (\S.*) -->$")


@dataclass(frozen=True)
class Block:
    """One fenced block. `line` is the line where its text begins; `not_run` says why no test runs the block."""

    page: str
    line: int
    language: str
    text: str
    not_run: str | None = None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


@dataclass(frozen=True)
class Command:
    """A command of a page, and the lines that the page shows as its output."""

    text: str
    output: tuple[str, ...] = ()


def blocks_of(page: str) -> list[Block]:
    """The fenced blocks of a page, in order."""
    blocks: list[Block] = []
    lines = (ROOT / page).read_text().splitlines()
    first_line: int | None = None
    for number, line in enumerate(lines):
        fence = _FENCE.match(line)
        if fence is None:
            continue
        if first_line is None:
            first_line = number
            continue
        language = _FENCE.match(lines[first_line])
        assert language is not None
        mark = _NOT_RUN.match(lines[first_line - 1]) if first_line else None
        text = textwrap.dedent("\n".join(lines[first_line + 1 : number]))
        blocks.append(Block(page, first_line + 2, language[1], text, mark[1] if mark else None))
        first_line = None
    assert first_line is None, f"{page}: the block that begins in line {first_line} does not end"
    return blocks


def commands_in(block: Block) -> list[Command]:
    """The commands of a shell block. In a `console` block a command begins with `$ `; other lines are output.

    A command continues on the next line after a backslash, and while a quotation is open.
    """
    commands: list[Command] = []
    for line in block.text.replace("\\\n", " ").splitlines():
        if commands and _has_open_quote(commands[-1].text):
            commands[-1] = Command(f"{commands[-1].text}\n{line}")
        elif block.language == "bash":
            commands += [Command(line)] if line and not line.startswith("#") else []
        elif line.startswith("$ "):
            commands.append(Command(line[2:]))
        else:
            assert commands, f"{block}: output comes before the first command"
            commands[-1] = Command(commands[-1].text, (*commands[-1].output, line))
    return commands


def _has_open_quote(text: str) -> bool:
    try:
        shlex.split(text, comments=True)
    except ValueError:
        return True
    return False
