"""docs/reference/parsers.md."""

from __future__ import annotations

from skyrl.inference.parsers import CALLS, RENDERED_BY_VLLM, THOUGHTS
from tests.architectures.cookbook import listed, model_type_of
from tests.architectures.parsers_page import PAGE, render
from tests.unit.inference.released_models import COOKBOOK, MODELS


def test_the_page_is_made_from_the_models() -> None:
    assert PAGE.read_text() == render(), "make architectures writes it"


def test_each_model_of_the_cookbook_has_its_parsers() -> None:
    assert list(COOKBOOK) == list(listed().models)
    for model, given in COOKBOOK.items():
        kind = model_type_of(model) or ""
        if given is None:
            continue
        calls, thoughts = (MODELS[given].calls, MODELS[given].thoughts) if isinstance(given, str) else given
        if kind in RENDERED_BY_VLLM:
            assert (calls, thoughts) == RENDERED_BY_VLLM[kind], model
            continue
        for parser, formats in ((calls, CALLS), (thoughts, THOUGHTS)):
            assert parser is None or parser in {each.parser for each in formats if kind.startswith(each.kinds)}, model
