"""docs/reference/architectures.md and docs/cookbook.md list the models and recipes of the installed cookbook."""

from __future__ import annotations

from tests.architectures import cookbook
from tests.cookbook import recipes


def test_the_page_is_made_from_the_installed_cookbook() -> None:
    assert cookbook.installed() == cookbook.listed(), "`make tables NEW=models` writes the page anew"


def test_each_model_has_a_renderer_that_is_recommended_first() -> None:
    assert len(cookbook.listed().models) >= 46
    assert all(cookbook.listed().models.values())


def test_the_page_of_recipes_has_those_of_the_installed_cookbook() -> None:
    assert recipes.installed() == recipes.listed(), "`make tables NEW=models` writes the page anew"
