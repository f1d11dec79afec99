"""Rows leave skyrl/storage/db as typed values: none of its public functions and classes has `Any` in its annotations,
and the modules that use them name the types of rows."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import skyrl.storage.db

PACKAGE = Path(skyrl.storage.db.__file__).parent
SOURCE = PACKAGE.parents[1]
JSON = {"dict", "Mapping"}
"""Types whose `Any` is allowed, because `dict[str, Any]` is a JSON object."""
OF_ROWS = {"Iterable", "Iterator", "Sequence", "frozenset", "list", "set", "tuple"}


def has_any(annotation: ast.AST | None) -> bool:
    """Whether an annotation contains `Any` outside of a JSON object."""
    match annotation:
        case None:
            return False
        case ast.Name(id=name):
            return name == "Any"
        case ast.Subscript(value=ast.Name(id=name)) if name in JSON:
            return False
    return any(has_any(part) for part in ast.iter_child_nodes(annotation))


def public_annotations(body: list[ast.stmt]) -> Iterator[tuple[int, ast.expr | None]]:
    """The annotations that other packages see, with their lines. A parameter `row` is exempt: functions with this
    parameter turn a row into a typed value."""
    for node in body:
        match node:
            case ast.ClassDef(name=name, body=inner) if not name.startswith("_"):
                yield from ((item.lineno, item.annotation) for item in inner if isinstance(item, ast.AnnAssign))
                yield from public_annotations(inner)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) if name == "__init__" or name[0] != "_":
                parameters = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                yield from ((node.lineno, item.annotation) for item in parameters if item.arg != "row")
                yield node.lineno, node.returns


def lines_with_any(source: str) -> list[int]:
    return [line for line, annotation in public_annotations(ast.parse(source).body) if has_any(annotation)]


def test_annotations_with_any_are_found() -> None:
    assert lines_with_any("def page(tenant: str) -> tuple[list[Any], int]: ...") == [1]
    assert lines_with_any("class Found:\n    row: Any\n    notes: dict[str, Any] | None") == [2]
    assert lines_with_any("class Keys:\n    async def find(self, saved: Any | None) -> None: ...") == [2]
    assert lines_with_any("def key_of(row: Any) -> ApiKey: ...\ndef _rows() -> list[Any]: ...") == []


def test_rows_leave_db_as_typed_values() -> None:
    found = {
        f"{path.name}:{line}" for path in sorted(PACKAGE.glob("*.py")) for line in lines_with_any(path.read_text())
    }
    assert not found


def of_any(annotation: ast.AST | None) -> bool:
    """Whether an annotation says `Sequence[Any]`, `list[Any]` or the like."""
    parts = [] if annotation is None else ast.walk(annotation)
    found = [part.slice for part in parts if isinstance(part, ast.Subscript) and ast.unparse(part.value) in OF_ROWS]
    return any(has_any(inner) for inner in found)


def untyped_rows(source: str) -> list[int]:
    """Lines of functions, also of private and nested ones, that take or return untyped rows."""
    lines: list[int] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            given = [each.annotation for each in ast.walk(node.args) if isinstance(each, ast.arg)]
            lines += [node.lineno for annotation in (node.returns, *given) if of_any(annotation)]
    return lines


def test_untyped_rows_are_found_where_they_are_used() -> None:
    assert untyped_rows("def wait(tell: Callable[[Sequence[Any]], None]) -> None: ...") == [1]
    assert untyped_rows("class _Ends:\n    async def _read(self) -> tuple[list[Ended], Any]: ...") == [2]
    assert untyped_rows("def f():\n    def read(*rows: list[Any]): ...") == [2]
    assert untyped_rows("def reply(value: Any, notes: list[dict[str, Any]]) -> list[Ended]: ...") == []


def test_rows_are_used_as_typed_values() -> None:
    uses_rows = re.compile(r"skyrl\.storage\.db\.(?!faults)")
    users = [path for path in SOURCE.rglob("*.py") if path.parent != PACKAGE and uses_rows.search(path.read_text())]
    assert len(users) > 50
    found = {f"{path.relative_to(SOURCE)}:{line}" for path in users for line in untyped_rows(path.read_text())}
    assert not found
