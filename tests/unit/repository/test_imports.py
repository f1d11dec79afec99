"""The imports of skyrl have no circle, and the drawing of them in docs/reading-the-code.md is up to date."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.import_drawing import BEGIN, END, PAGE, door_imports, drawing, file_imports, levels

SOURCE = Path(__file__).parents[3] / "skyrl"
EXECUTES = {"execute", "exec_driver_sql", "scalar", "scalars"}
LISTENS = {"storage/notices.py"}
"""Files that run LISTEN and NOTIFY on connections of their own, and no statement on skyrl's tables."""


def test_imports_between_files_have_no_circle() -> None:
    files = file_imports()
    assert len(files) > 200, "the graph has all files"
    TopologicalSorter(files).prepare()


ARROWS = 51
LIBRARIES = {"agents", "rollout", "weights"}
"""What programs of others import."""


def test_twelve_doors_few_arrows_between_them_and_no_circle() -> None:
    doors = door_imports(file_imports())
    assert doors.keys() >= LIBRARIES | {"api", "base", "engine", "sampling", "trainer"}
    assert len(doors.keys() - LIBRARIES) == 12
    assert sum(map(len, doors.values())) <= ARROWS
    TopologicalSorter(doors).prepare()  # raises CycleError, which names the circle


def test_each_door_says_what_it_knows_and_what_not() -> None:
    for door in SOURCE.glob("*/__init__.py"):
        said = ast.get_docstring(ast.parse(door.read_text())) or ""
        assert re.search(r"\bknows?\b", said, re.IGNORECASE), door
        assert len(said) < 400, door


def test_a_circle_of_doors_is_found_although_the_files_have_none() -> None:
    files = {"skyrl": set(), "skyrl.a": {"skyrl.b.x"}, "skyrl.b": set(), "skyrl.b.x": set(), "skyrl.b.y": {"skyrl.a"}}
    TopologicalSorter(files).prepare()
    with pytest.raises(CycleError):
        TopologicalSorter(door_imports(files)).prepare()
    with pytest.raises(CycleError):
        levels(door_imports(files))


def test_every_module_belongs_to_a_door() -> None:
    """The test of doors above would not see a module that lies directly below skyrl."""
    assert [path.name for path in SOURCE.glob("*.py")] == ["__init__.py"]


def test_the_drawing_of_imports_is_up_to_date() -> None:
    drawn = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    assert drawn == drawing(), "`make tables` draws it again"


OF_AGENTS = {"openai", "verifiers"}
"""What an agent brings with it: the clients of an example that shows agents."""


def test_examples_import_what_is_installed_with_the_demo() -> None:
    project = tomllib.loads((SOURCE.parent / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    required = [*project["dependencies"], *extras["demo"], *extras["cpu"]]
    installed = {re.split(r"[^\w-]", one)[0].replace("-", "_") for one in required}
    examples = list((SOURCE.parent / "examples").glob("*.py"))
    known = {*sys.stdlib_module_names, "skyrl", *installed, *OF_AGENTS, *(path.stem for path in examples)}
    for path in examples:
        nodes = list(ast.walk(ast.parse(path.read_text())))
        names = {name.name for node in nodes if isinstance(node, ast.Import) for name in node.names}
        names |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
        assert {name.partition(".")[0] for name in names} <= known, path


def statements_outside_db() -> set[str]:
    """Files outside skyrl/storage/db that call a method of EXECUTES on a connection."""
    found = set()
    for path in sorted(SOURCE.rglob("*.py")):
        name = str(path.relative_to(SOURCE))
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(func=ast.Attribute(value=ast.Name(id="c" | "connection"), attr=attr)) if attr in EXECUTES:
                    found.add(name)
    return {name for name in found if not name.startswith("storage/db/")}


def test_only_skyrl_db_executes_statements() -> None:
    assert statements_outside_db() == LISTENS
