"""The kinds of items and blocks that agents send: each is known, and the documentation shows what becomes of it."""

from __future__ import annotations

from tests.agents.kinds import COMMAND, PAGE, anthropic_blocks, kept, openai_items, page, unknown


def test_the_server_knows_every_kind_of_todays_agents_and_sdks() -> None:
    assert unknown(kept()) == {}
    assert len(kept().kinds) >= 18
    assert len(openai_items()) >= 30
    assert len(anthropic_blocks()) >= 24


def test_the_page_shows_what_the_server_does() -> None:
    assert PAGE.read_text() == page(kept()), f"run `{COMMAND}`"
