"""docs/cookbook.md has each recipe of the cookbook, with the data and the commands of its runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cookbook import recipes, record
from tests.cookbook.page import BEGIN, END, SERVER, render, runs_of
from tests.cookbook.record import VARIABLE, Shown, keep, read

KEPT, LISTED = record.read(), recipes.listed()
NEW = "`make tables NEW=cookbook` runs the recipes and writes the page anew"
SHOWN = Shown(
    "math_rl.train",
    [SERVER, "python -m y dataset=lessons/y", "python -m x"],
    "rows",
    "the reward rises",
    7.6,
    {"reward": [0.123, 0.987]},
)
MARKED = f"# A\n\n{BEGIN}\nold\n{END}\n\nend\n"


def test_every_recipe_of_the_cookbook_runs_or_says_what_it_needs() -> None:
    run = {recipe for recipe in LISTED if runs_of(recipe, KEPT)}
    assert set(LISTED) - run == set(recipes.NEEDS), NEW


def test_no_kept_command_has_a_path_or_an_id_of_one_run() -> None:
    commands = [command for shown in KEPT.values() for command in shown.commands]
    assert not [each for each in commands if "/tmp" in each or ":train:" in each]


def test_a_run_is_kept_beside_others_only_where_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    keep("nowhere", SHOWN)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "runs.json"))
    keep("one", SHOWN)
    keep("two", SHOWN)
    kept = read(tmp_path / "runs.json")
    assert list(kept) == ["one", "two"]
    assert (kept["one"].seconds, kept["one"].figures) == (8, {"reward": [0.12, 0.99]})


def test_a_recipe_has_its_data_and_its_commands() -> None:
    text = render(MARKED, {"one": SHOWN}, ["audio", "math_rl"], {"audio": "ears"})
    assert "old" not in text
    assert "### `audio` { #audio }\n\nDoes not run: needs ears.\n" in text
    assert "\nThe reward rises. Data: rows.\n" in text
    assert "```console\n$ python -m x\n```" in text, "the usual server and the lesson are left out"
    assert render(text, {"one": SHOWN}, ["audio", "math_rl"], {"audio": "ears"}) == text


def test_a_page_without_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="mark"):
        render("# A\n", {}, [], {})
