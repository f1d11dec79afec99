"""The part of docs/cookbook.md that is made from the kept runs: a row for each recipe, then the commands of each run
without the server's usual one.

Equal runs give an equal page. Runs nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from tests.cookbook.record import Shown
from tests.environments import ROOT

PAGE = ROOT / "docs" / "cookbook.md"
BEGIN = "<!-- From here `make tables` writes: change the tests' runs, not this text. -->"
END = "<!-- To here `make tables` writes. -->"
SERVER = "skyrl serve --base-model /models/Qwen3-4B-Instruct-2507 --served-model-name Qwen/Qwen3-4B-Instruct-2507"
"""Starts the server of most runs. The page has it once, above the table."""
Runs = Mapping[str, Shown]


def render(text: str, runs: Runs, recipes: Sequence[str], needs: Mapping[str, str]) -> str:
    """The page `text` with its part between the two marks made anew. Raises ValueError if a mark is missing."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError("docs/cookbook.md: a mark of make tables is missing")
    made = "\n\n".join([_rows(runs, recipes, needs), *_commands(runs, recipes)])
    return f"{before}{BEGIN}\n\n{made}\n\n{END}{after}"


def runs_of(recipe: str, runs: Runs) -> dict[str, Shown]:
    """The runs of a recipe's folder by their names, in the order of the names."""
    return {name: runs[name] for name in sorted(runs) if runs[name].folder == recipe}


def _rows(runs: Runs, recipes: Sequence[str], needs: Mapping[str, str]) -> str:
    lines = ["| recipe | data |", "|---|---|"]
    for recipe in recipes:
        found = list(runs_of(recipe, runs).values())
        if found:
            data = _joined(shown.data or "made by the recipe" for shown in found)
            cells = [f"[`{recipe}`](#{recipe})", data]
        else:
            cells = [f"`{recipe}`", f"does not run: needs {needs.get(recipe, 'a test')}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _commands(runs: Runs, recipes: Sequence[str]) -> Iterator[str]:
    for recipe in recipes:
        found = runs_of(recipe, runs)
        if found:
            yield f"### `{recipe}` {{ #{recipe} }}"
        for shown in found.values():
            yield _sentence(shown.shows)
            commands = (command for command in shown.commands if command != SERVER)
            yield "\n".join(["```console", *(f"$ {_wrapped(command)}" for command in commands), "```"])


def _sentence(clause: str) -> str:
    return f"{clause[0].upper()}{clause[1:]}."


def _joined(parts: Iterable[str]) -> str:
    return "<br>".join(dict.fromkeys(parts))


def _wrapped(command: str) -> str:
    """The command in lines of at most 100 characters, as a shell takes them. An option stays beside its value."""
    lines, line = [], ""
    for word in re.findall(r"--\S+ [^-\s]\S*|\S+", command):
        if line and len(line) + len(word) > 100:
            lines.append(f"{line} \\")
            line = f"    {word}"
        else:
            line = f"{line} {word}" if line else word
    return "\n".join([*lines, line])
