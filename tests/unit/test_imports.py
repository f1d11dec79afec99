"""The imports of skyrl have no circle, and docs/development.md draws them as they are."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.import_drawing import BEGIN, END, PAGE, drawing, file_imports, levels, package_imports

SOURCE = Path(__file__).parents[2] / "skyrl"
EXECUTES = {"execute", "exec_driver_sql", "scalar", "scalars"}
LISTENS = {"notify/postgres.py"}
"""LISTEN and NOTIFY on connections of their own, which are no transactions on skyrl's tables."""


def test_no_circle_of_files() -> None:
    files = file_imports()
    assert len(files) > 200, "the graph has all files"
    TopologicalSorter(files).prepare()  # raises CycleError, which names the circle


def test_no_circle_of_packages() -> None:
    packages = package_imports(file_imports())
    assert {"api", "db", "engine", "wire"} <= packages.keys()
    TopologicalSorter(packages).prepare()


def test_circle_is_found() -> None:
    files = {"skyrl": set(), "skyrl.a": {"skyrl.b.x"}, "skyrl.b": set(), "skyrl.b.x": set(), "skyrl.b.y": {"skyrl.a"}}
    TopologicalSorter(files).prepare()
    with pytest.raises(CycleError):
        TopologicalSorter(package_imports(files)).prepare()
    with pytest.raises(CycleError):
        levels(package_imports(files))


def test_no_file_is_a_script_without_a_package() -> None:
    """The circles above are looked for in packages: a module directly below skyrl would escape the layers' rule."""
    assert [path.name for path in SOURCE.glob("*.py")] == ["__init__.py"]


def test_drawing_is_up_to_date() -> None:
    drawn = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    assert drawn == drawing(), "write it again: .venv/bin/python -m tests.import_drawing"


def statements_outside_db() -> set[str]:
    """Files that execute a statement themselves: a call of `execute` and the like on a connection."""
    found = set()
    for path in sorted(SOURCE.rglob("*.py")):
        name = str(path.relative_to(SOURCE))
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(func=ast.Attribute(value=ast.Name(id="c" | "connection"), attr=attr)) if attr in EXECUTES:
                    found.add(name)
    return {name for name in found if not name.startswith("db/")}


def test_statements_are_executed_in_db_alone() -> None:
    assert statements_outside_db() == LISTENS
