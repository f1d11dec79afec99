"""The part of docs/cookbook.md that is made from the kept runs: for each recipe its runs, with their data and commands.

Left out are the start of the usual server, and what teaches the tiny model before the run.

Equal runs give an equal page. Runs nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from tests.cookbook.record import Shown
from tests.environments import ROOT

PAGE = ROOT / "docs" / "cookbook.md"
BEGIN = "<!-- From here `make tables` writes: change the tests' runs, not this text. -->"
END = "<!-- To here `make tables` writes. -->"
SERVER = "skyrl serve --base-model /models/Qwen3-4B-Instruct-2507 --served-model-name Qwen/Qwen3-4B-Instruct-2507"
"""Starts the server of most runs. The page has it once, above the runs."""
_TEACHES = re.compile(r" dataset=lessons/|^cp -r runs/")
Runs = Mapping[str, Shown]


def render(text: str, runs: Runs, recipes: Sequence[str], needs: Mapping[str, str]) -> str:
    """The page `text` with its part between the two marks made anew. Raises ValueError if a mark is missing."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError("docs/cookbook.md: a mark of make tables is missing")
    made = "\n\n".join(part for recipe in recipes for part in _recipe(recipe, runs, needs))
    return f"{before}{BEGIN}\n\n{made}\n\n{END}{after}"


def runs_of(recipe: str, runs: Runs) -> dict[str, Shown]:
    """The runs of a recipe's folder by their names, in the order of the names."""
    return {name: runs[name] for name in sorted(runs) if runs[name].folder == recipe}


def _recipe(recipe: str, runs: Runs, needs: Mapping[str, str]) -> Iterator[str]:
    yield f"### `{recipe}` {{ #{recipe} }}"
    found = runs_of(recipe, runs)
    if not found:
        yield f"Does not run: needs {needs.get(recipe, 'a test')}."
    for shown in found.values():
        data = f" Data: {shown.data}." if shown.data else ""
        yield f"{shown.shows[0].upper()}{shown.shows[1:]}.{data}"
        commands = (command for command in shown.commands if command != SERVER and not _TEACHES.search(command))
        yield "\n".join(["```console", *(f"$ {_wrapped(command)}" for command in commands), "```"])


def _wrapped(command: str) -> str:
    """The command in lines of at most 100 characters, as a shell takes them. An option stays beside its value. Between
    quotes, where only JSON has blanks, a line ends without a stroke."""
    lines, line = [], ""
    for word in re.findall(r"--\S+ [^-\s]\S*|\S+", command):
        if line and len(line) + len(word) > 100:
            is_quoted = "\n".join([*lines, line]).count("'") % 2
            lines.append(line if is_quoted else f"{line} \\")
            line = f"    {word}"
        else:
            line = f"{line} {word}" if line else word
    return "\n".join([*lines, line])
