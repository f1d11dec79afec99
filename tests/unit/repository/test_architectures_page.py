"""The answers of docs/reference/architectures.md follow the figures that the tests of families have left."""

from __future__ import annotations

import pytest

from tests.architectures import cookbook, figures
from tests.architectures.cookbook import Cookbook
from tests.architectures.page import PAGE, TRIED, UNKNOWN, Figures, Verdict, render, verdicts
from tests.architectures.rows import ROWS

KEPT, LISTED = figures.read(), cookbook.listed()
NEW = "`make tables NEW=architectures` measures and writes the page anew"


def test_every_family_has_a_row_and_figures() -> None:
    assert TRIED.keys() == ROWS.keys()
    assert [family for family in TRIED if "logprob" not in KEPT.get(family, {})] == [], NEW


def test_most_models_of_the_cookbook_train() -> None:
    assert sum(each.trains for each in verdicts(KEPT, LISTED)) >= 42


def verdict(model: str, kept: Figures) -> Verdict:
    return verdicts(kept, Cookbook("1.0", {model: ["qwen3"]}))[0]


def test_a_model_trains_if_the_tests_of_its_family_left_figures() -> None:
    model = "Qwen/Qwen3-8B"
    assert verdict(model, {"qwen3": {"logprob": 1e-6}}).trains
    assert not verdict(model, {"qwen3": {"vllm": {}}}).trains
    assert not verdict(model, {"llama-3": {"logprob": 1e-6}}).trains


def test_a_model_that_does_not_train_says_why() -> None:
    said = {"refused": {"inkling_text": "no"}}
    assert verdict("thinkingmachines/Inkling", said).why == "no"
    assert verdict("thinkingmachines/Inkling-2-Small", said).why.endswith("has no class for it; 5.24 has one")
    assert "has no class" in verdict("moonshotai/Kimi-K3.1-Pro", said).why
    assert verdict("Qwen/Qwen3-8B", said).why == "no test tries it"


@pytest.mark.parametrize("model", ["Qwen/Qwen4-8B", "new/Model-7B"])
def test_a_name_that_no_pattern_matches_is_shown_as_unknown(model: str) -> None:
    text = render(KEPT, Cookbook("9.0", {**LISTED.models, model: ["qwen4"]}))
    assert f"| `{model}` | ? | `qwen4` | no: {UNKNOWN} |" in text
    assert UNKNOWN not in PAGE.read_text()


def test_other_figures_give_another_page() -> None:
    changed = {**KEPT, "qwen3": {**KEPT["qwen3"], "logprob": 0.5}}
    assert render(changed, LISTED) != render(KEPT, LISTED)
