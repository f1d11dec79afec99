"""Draws the imports between the doors of skyrl, and writes the drawing into docs/reading-the-code.md:

.venv/bin/python -m tests.import_drawing
"""

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


def package_imports(files: Imports, depth: int) -> Imports:
    """Imports between packages at most `depth` below skyrl: 1 for doors. A file belongs to the innermost of them."""
    parents = {module.rpartition(".")[0] for module in files}

    def package(module: str) -> str | None:
        """None for skyrl itself."""
        below = module.split(".")[1 : depth + 1]
        return ".".join(below if ".".join(["skyrl", *below]) in parents else below[:-1]) or None

    packages: dict[str, set[str]] = {}
    for module, imported in files.items():
        if (name := package(module)) is not None:
            packages.setdefault(name, set()).update({package(other) or name for other in imported} - {name})
    return packages


def levels(packages: Imports) -> list[list[str]]:
    """The packages in levels, the lowest first. A package imports from lower levels only. Raises CycleError."""
    height: dict[str, int] = {}
    for package in TopologicalSorter(packages).static_order():
        height[package] = 1 + max((height[name] for name in packages[package]), default=-1)
    return [sorted(p for p in height if height[p] == level) for level in range(1 + max(height.values()))]


def drawing() -> str:
    """The levels from the highest to the lowest; on each line a door and its imports."""
    doors = package_imports(file_imports(), 1)
    from_top = levels(doors)[::-1]
    width = max(map(len, doors))
    ordered = [
        [door for level in from_top for door in level if door in doors[name]] for level in from_top for name in level
    ]
    lines: list[str] = []
    for level in from_top:
        lines += [f"{name:<{width}}  ->  {'  '.join(ordered.pop(0)) or '-'}" for name in level] + [""]
    return "\n".join(["```text", *lines[:-1], "```", ""])


def main() -> None:
    before, rest = PAGE.read_text().split(BEGIN)
    _, after = rest.split(END)
    PAGE.write_text(before + BEGIN + drawing() + END + after)


if __name__ == "__main__":
    main()
