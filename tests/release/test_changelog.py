"""The changelog has an entry for this version, and tests start on the state of the version before."""

from __future__ import annotations

import re
from datetime import date
from pathlib import Path

from skyrl import __version__
from skyrl.storage.db.migrate import newest_revision

from .old_state import unpack

CHANGELOG = Path(__file__).parents[2] / "CHANGELOG.md"


def entries() -> dict[str, str]:
    """The text of each version's entry, in the order of the file. Raises ValueError for a date that is none."""
    found: dict[str, str] = {}
    for part in re.split(r"^## ", CHANGELOG.read_text(), flags=re.M)[1:]:
        heading, _, text = part.partition("\n")
        match = re.fullmatch(r"(\d+\.\d+\.\d+) \((\d{4}-\d\d-\d\d)\)", heading)
        assert match is not None, f"{heading!r} is no version with a date"
        date.fromisoformat(match[2])
        found[match[1]] = text
    return found


def numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def test_the_newest_entry_is_this_version_and_the_others_are_older() -> None:
    versions = [*entries()]
    assert versions[0] == __version__
    assert versions == sorted(versions, key=numbers, reverse=True)


def test_each_entry_says_what_operators_do_and_which_schema_it_has() -> None:
    assert len(entries()) >= 2
    for version, text in entries().items():
        assert "**Operators**" in text, version
        assert re.search(r"^Schema: revisions? \d{4}", text, re.M), version
    assert f"Schema: revision {newest_revision()}" in entries()[__version__]


def test_the_state_that_tests_start_on_is_that_of_the_last_version(tmp_path: Path) -> None:
    _, last, *_ = entries()
    assert unpack(tmp_path / "state").version == last
