"""The tests, files and folders of tests/ and skyrl/ that pages name exist, and the pages list every loss and metric."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").glob("*.md")])
NAMED = re.compile(r"(?:\btests|(?<=`)skyrl)(?:/[\w.]*\w)+(?:::\w+)*")


def named_in(page: Path) -> list[str]:
    return NAMED.findall(page.read_text())


def functions(file: Path) -> set[str]:
    tree = ast.parse(file.read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def exists(named: str) -> bool:
    path, *names = named.split("::")
    file = ROOT / path
    return file.exists() and (not names or set(names) <= functions(file))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_file_that_a_page_names_exists(page: Path) -> None:
    assert [named for named in named_in(page) if not exists(named)] == []


def test_names_in_pages_are_found_and_wrong_names_noticed() -> None:
    this_file = "tests/unit/repository/test_docs.py"
    assert f"{this_file}::test_every_file_that_a_page_names_exists" in named_in(ROOT / "docs/operating/reliability.md")
    assert "skyrl/trainer/losses.py" in named_in(ROOT / "docs/development.md")
    assert exists(this_file)
    assert exists("tests/unit")
    assert exists(f"{this_file}::{test_names_in_pages_are_found_and_wrong_names_noticed.__name__}")
    assert not exists(f"{this_file}::test_that_is_none")
    assert not exists("tests/unit/test_that_is_none.py")
    assert not exists("skyrl/none.py")


def first_cells(page: str, heading: str) -> set[str]:
    """The names in code font in the first column of a section's table."""
    section = re.split(r"^## ", (ROOT / page).read_text(), flags=re.M)
    (chosen,) = (part for part in section if part.startswith(f"{heading}\n"))
    rows = [line.split("|")[1] for line in chosen.partition("\n|---")[2].splitlines() if line.startswith("| ")]
    return {name for cell in rows for name in re.findall(r"`([^`]+)`", cell)}


def test_the_page_on_training_lists_every_loss_and_metric() -> None:
    metrics = re.findall(r'"(\w+:(?:sum|min|max|mean))"', (ROOT / "skyrl/trainer/tally.py").read_text())
    assert first_cells("docs/how-it-works/training.md", "Metrics") == {*metrics}
    losses_py = (ROOT / "skyrl/trainer/losses.py").read_text()
    table = losses_py.partition("LOSSES: dict")[2].partition("\n}\n")[0]
    losses = re.findall(r'^    "(\w+)": (?:Loss|_policy)\(', table, flags=re.M)
    assert len(losses) > 5
    assert first_cells("docs/how-it-works/training.md", "Losses") == {*losses}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_table_begins_with_its_header(page: Path) -> None:
    """Behind an empty line a row begins another table; without a line of strokes below, it is shown as text."""
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.M | re.S)
    tables = re.findall(r"(?:^\|.*\n)+", text, flags=re.M)
    assert [table for table in tables if not re.match(r"\|.*\n\|[-:| ]+\|\n", table)] == []


READING_ORDER = ROOT / "docs/reading-the-code.md"


def definitions() -> dict[str, set[str]]:
    """The classes of the package, each with the names of its functions and of the attributes that it uses."""
    found: dict[str, set[str]] = {}
    for file in (ROOT / "skyrl").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                inner = [*ast.walk(node)]
                names = {part.name for part in inner if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)}
                names |= {part.attr for part in inner if isinstance(part, ast.Attribute)}
                found.setdefault(node.name, set()).update(names)
    return found


def test_the_classes_that_the_reading_order_names_exist() -> None:
    known = definitions()
    named = re.findall(r"`([A-Z]\w*[a-z]\w*)(?:\.(\w+))?`", READING_ORDER.read_text())
    assert len(named) > 15
    assert [name for name in named if name[0] not in known or (name[1] and name[1] not in known[name[0]])] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_file_of_the_package_that_a_page_names_exists(page: Path) -> None:
    named = re.findall(r"(?<![/\w])skyrl/[\w/]+(?:\.py|/)(?!\w)", page.read_text())
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_the_routes_that_the_reading_order_names_exist() -> None:
    """Rows of the form "`function` in `skyrl/path`"."""
    rows = re.findall(r"`(\w+)`(?: and `(\w+)`)? in `(skyrl/[\w/.]+)`", READING_ORDER.read_text())
    assert len(rows) >= 5
    for first, second, path in rows:
        files = [ROOT / path] if path.endswith(".py") else [*(ROOT / path).rglob("*.py")]
        text = "\n".join(file.read_text() for file in files)
        for name in filter(None, (first, second)):
            assert re.search(rf"\b(?:def|class) {name}\b", text), f"{name} in {path}"


DECISIONS = sorted((ROOT / "docs/decisions").glob("*.md"))
PARTS = ["What.", "Why.", "Alternatives.", "Price."]
MOST_WORDS = 230


def words(text: str) -> int:
    """Words and numbers, without the strokes of tables and lists."""
    return len(re.findall(r"\S*\w\S*", text))


def test_strokes_of_tables_and_lists_are_no_words() -> None:
    assert words("# A title\n\n| a | 0.5 s |\n|---|---|\n\n- One line: 8 × 128.\n") == 9


def test_there_are_few_decision_pages_and_contributors_know_their_bound() -> None:
    assert 1 < len(DECISIONS) <= 32
    assert f"in at most {MOST_WORDS} words" in (ROOT / "CONTRIBUTING.md").read_text()


@pytest.mark.parametrize("page", DECISIONS, ids=lambda page: page.stem)
def test_a_decision_page_fits_one_screen_and_has_the_same_parts(page: Path) -> None:
    text = page.read_text()
    assert words(text) <= MOST_WORDS
    if page.name != "index.md":
        assert re.findall(r"^\*\*([A-Z]\w+\.)\*\*", text, flags=re.M) == PARTS


def test_the_index_of_decisions_names_every_page_once() -> None:
    named = re.findall(r"\]\(([\w-]+\.md)\)", (ROOT / "docs/decisions/index.md").read_text())
    assert sorted(named) == [page.name for page in DECISIONS if page.name != "index.md"]
