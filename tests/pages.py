"""The fenced blocks of the pages: what they hold, and which of them a page says cannot run in a test.

A page marks such a block with a comment on the line before: `<!-- not run: why -->`. Readers of the page do not see it.
Knows the form of the pages; runs nothing.
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
"""Languages of blocks that are run, unless they are marked."""

SETTINGS = ("toml", "nginx", "ini", "logrotate")
"""Languages of blocks that are checked as far as the machine allows."""

OUTPUT = ("text", "json")

_FENCE = re.compile(r"^ *```(\w*)$")
_NOT_RUN = re.compile(r"^ *<!-- not run: (\S.*) -->$")


@dataclass(frozen=True)
class Block:
    """One fenced block; `line` is where its text begins, and `not_run` says why no test runs it."""

    page: str
    line: int
    language: str
    text: str
    not_run: str | None = None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


@dataclass(frozen=True)
class Command:
    """A command as a page shows it, and the lines that the page shows as its output."""

    text: str
    output: tuple[str, ...] = ()


def blocks_of(page: str) -> list[Block]:
    """The fenced blocks of a page, in their order."""
    blocks: list[Block] = []
    lines = (ROOT / page).read_text().splitlines()
    begun: int | None = None
    for number, line in enumerate(lines):
        fence = _FENCE.match(line)
        if fence is None:
            continue
        if begun is None:
            begun = number
            continue
        language = _FENCE.match(lines[begun])
        assert language is not None
        mark = _NOT_RUN.match(lines[begun - 1]) if begun else None
        text = textwrap.dedent("\n".join(lines[begun + 1 : number]))
        blocks.append(Block(page, begun + 2, language[1], text, mark[1] if mark else None))
        begun = None
    assert begun is None, f"{page}: the block that begins in line {begun} does not end"
    return blocks


def commands_in(block: Block) -> list[Command]:
    """The commands of a shell block. In a `console` block they begin with `$ `, and other lines are output.

    A command goes on in the next line after a backslash, and while a quotation is open.
    """
    commands: list[Command] = []
    for line in block.text.replace("\\\n", " ").splitlines():
        if commands and _is_open(commands[-1].text):
            commands[-1] = Command(f"{commands[-1].text}\n{line}")
        elif block.language == "bash":
            commands += [Command(line)] if line and not line.startswith("#") else []
        elif line.startswith("$ "):
            commands.append(Command(line[2:]))
        else:
            assert commands, f"{block}: output comes before the first command"
            commands[-1] = Command(commands[-1].text, (*commands[-1].output, line))
    return commands


def _is_open(text: str) -> bool:
    try:
        shlex.split(text, comments=True)
    except ValueError:
        return True
    return False
