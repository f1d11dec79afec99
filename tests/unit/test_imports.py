"""The imports of skyrl have no circle, and the drawing of them in docs/development.md is up to date."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.import_drawing import BEGIN, END, PAGE, drawing, file_imports, levels, package_imports

SOURCE = Path(__file__).parents[2] / "skyrl"
EXECUTES = {"execute", "exec_driver_sql", "scalar", "scalars"}
LISTENS = {"notify/postgres.py"}
"""Files that run LISTEN and NOTIFY on connections of their own, and no statement on skyrl's tables."""


def test_imports_between_files_have_no_circle() -> None:
    files = file_imports()
    assert len(files) > 200, "the graph has all files"
    TopologicalSorter(files).prepare()  # raises CycleError, which names the circle


def test_imports_between_packages_have_no_circle() -> None:
    packages = package_imports(file_imports())
    assert {"api", "db", "engine", "wire"} <= packages.keys()
    TopologicalSorter(packages).prepare()


def test_a_circle_of_packages_is_found_although_the_files_have_none() -> None:
    files = {"skyrl": set(), "skyrl.a": {"skyrl.b.x"}, "skyrl.b": set(), "skyrl.b.x": set(), "skyrl.b.y": {"skyrl.a"}}
    TopologicalSorter(files).prepare()
    with pytest.raises(CycleError):
        TopologicalSorter(package_imports(files)).prepare()
    with pytest.raises(CycleError):
        levels(package_imports(files))


def test_every_module_belongs_to_a_package() -> None:
    """The test of packages above would not see a module that lies directly below skyrl."""
    assert [path.name for path in SOURCE.glob("*.py")] == ["__init__.py"]


def test_the_drawing_of_imports_is_up_to_date() -> None:
    drawn = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    assert drawn == drawing(), "draw it again: .venv/bin/python -m tests.import_drawing"


def statements_outside_db() -> set[str]:
    """Files outside skyrl/storage/db that call a method of EXECUTES on a connection."""
    found = set()
    for path in sorted(SOURCE.rglob("*.py")):
        name = str(path.relative_to(SOURCE))
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(func=ast.Attribute(value=ast.Name(id="c" | "connection"), attr=attr)) if attr in EXECUTES:
                    found.add(name)
    return {name for name in found if not name.startswith("db/")}


def test_only_skyrl_db_executes_statements() -> None:
    assert statements_outside_db() == LISTENS
