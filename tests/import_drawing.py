"""Draws the imports between the packages of skyrl, and writes the drawing into docs/development.md:

.venv/bin/python -m tests.import_drawing
"""

from __future__ import annotations

from collections.abc import Mapping
from graphlib import TopologicalSorter
from pathlib import Path

import grimp

PAGE = Path(__file__).parents[1] / "docs" / "development.md"
BEGIN = "<!-- begin: drawn by tests/import_drawing.py -->\n"
END = "<!-- end: drawn by tests/import_drawing.py -->\n"

Imports = Mapping[str, set[str]]
"""The imports of each name."""


def file_imports() -> Imports:
    """Imports between modules of skyrl, including imports inside functions and for type checkers."""
    graph = grimp.build_graph("skyrl", cache_dir=None)
    return {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}


def package_imports(files: Imports) -> Imports:
    """Imports between the packages directly below skyrl."""
    packages: dict[str, set[str]] = {}
    for module, imported in files.items():
        if (package := _package(module)) is not None:
            found = packages.setdefault(package, set())
            found |= {_package(name) or package for name in imported} - {package}
    return packages


def _package(module: str) -> str | None:
    """The package of a module; None for skyrl itself."""
    _, _, rest = module.partition(".")
    return rest.partition(".")[0] or None


def levels(packages: Imports) -> list[list[str]]:
    """The packages in levels, the lowest first. A package imports from lower levels only. Raises CycleError."""
    height: dict[str, int] = {}
    for package in TopologicalSorter(packages).static_order():
        height[package] = 1 + max((height[name] for name in packages[package]), default=-1)
    return [sorted(p for p in height if height[p] == level) for level in range(1 + max(height.values()))]


def drawing() -> str:
    """The levels from the highest to the lowest, then each package with its imports."""
    packages = package_imports(file_imports())
    from_top = levels(packages)[::-1]
    lines = [f"{len(from_top) - 1 - index:>2}   {'   '.join(level)}" for index, level in enumerate(from_top)]
    width = max(map(len, packages))
    edges = [f"{name:<{width}}  imports  {' '.join(sorted(packages[name])) or '-'}" for name in sum(from_top, [])]
    return "\n".join(["```text", *lines, "", *edges, "```", ""])


def main() -> None:
    before, rest = PAGE.read_text().split(BEGIN)
    _, after = rest.split(END)
    PAGE.write_text(before + BEGIN + drawing() + END + after)


if __name__ == "__main__":
    main()
