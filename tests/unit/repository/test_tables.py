"""Every generated table of the pages is what `make tables` would write now, of records that are complete."""

from __future__ import annotations

from pathlib import Path

import pytest

from skyrl.inference.parsers import CALLS, RENDERED_BY_VLLM, THOUGHTS
from tests import tables
from tests.agents.kinds import anthropic_blocks, kept, openai_items, unknown
from tests.architectures.cookbook import listed, model_type_of
from tests.import_drawing import PAGE as DRAWN
from tests.unit.inference.released_models import COOKBOOK, MODELS

WRITTEN = sorted(tables.PAGES.keys() - {DRAWN})
"""`test_imports.py` has the drawing of the doors."""


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.name)
def test_the_page_is_current(page: Path) -> None:
    text = page.read_text()
    assert text == tables.PAGES[page](), "`make tables` writes the page anew"
    assert "`make tables`" in text


def test_only_known_tables_are_measured() -> None:
    with pytest.raises(SystemExit, match="no table is measured as 'all': models, architectures, cookbook"):
        tables.main(["all"])


def test_the_server_knows_every_kind_of_todays_agents_and_sdks() -> None:
    assert unknown(kept()) == {}
    assert len(kept().kinds) >= 18
    assert len(openai_items()) >= 30
    assert len(anthropic_blocks()) >= 24


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
