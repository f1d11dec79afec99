"""Draws the imports between the doors of skyrl for docs/reading-the-code.md, where `make tables` writes the drawing."""

from __future__ import annotations

from collections.abc import Mapping
from graphlib import TopologicalSorter
from pathlib import Path

import grimp

PAGE = Path(__file__).parents[1] / "docs" / "reading-the-code.md"
BEGIN = "<!-- begin: drawn by tests/import_drawing.py -->\n"
END = "<!-- end: drawn by tests/import_drawing.py -->\n"

Imports = Mapping[str, set[str]]
"""The imports of each name."""


def file_imports() -> Imports:
    """Imports between modules of skyrl, including imports inside functions and for type checkers."""
    graph = grimp.build_graph("skyrl", cache_dir=None)
    return {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}


def door_imports(files: Imports) -> Imports:
    """Imports between the packages directly below skyrl."""
    doors: dict[str, set[str]] = {}
    for module, imported in files.items():
        if (door := _door(module)) is not None:
            doors.setdefault(door, set()).update({_door(name) or door for name in imported} - {door})
    return doors


def _door(module: str) -> str | None:
    """The door of a module; None for skyrl itself."""
    return module.split(".")[1] if "." in module else None


def levels(doors: Imports) -> list[list[str]]:
    """The doors in levels, the lowest first. A door imports from lower levels only. Raises CycleError."""
    height: dict[str, int] = {}
    for door in TopologicalSorter(doors).static_order():
        height[door] = 1 + max((height[name] for name in doors[door]), default=-1)
    return [sorted(door for door in height if height[door] == level) for level in range(1 + max(height.values()))]


def drawing() -> str:
    """The levels from the highest to the lowest; on each line a door and its imports."""
    doors = door_imports(file_imports())
    from_top = levels(doors)[::-1]
    width = max(map(len, doors))
    ordered = [
        [door for level in from_top for door in level if door in doors[name]] for level in from_top for name in level
    ]
    lines: list[str] = []
    for level in from_top:
        lines += [f"{name:<{width}}  ->  {'  '.join(ordered.pop(0)) or '-'}" for name in level] + [""]
    return "\n".join(["```text", *lines[:-1], "```", ""])


def render(text: str) -> str:
    """The page `text` with a new drawing between its marks."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return before + BEGIN + drawing() + END + after
