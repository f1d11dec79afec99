"""Ranks of some layers as a client asks for them: which expressions are taken, and what their search may cost."""

from __future__ import annotations

import re
from typing import Any

import pytest

from skyrl.base.wire.errors import RequestError
from skyrl.base.wire.rank_pattern import MAX_WAYS, METADATA_KEY, check_same, rank_pattern_of, ways_to_match
from skyrl.base.wire.requests import LoraConfig


def asked(pattern: dict[str, int] | None = None, metadata: dict[str, Any] | None = None) -> tuple[tuple[str, int], ...]:
    return rank_pattern_of(LoraConfig(rank=8, rank_pattern=pattern), metadata, 32)


def test_expressions_that_users_of_peft_write_are_taken_in_their_order() -> None:
    pattern = {
        "lm_head": 32,
        "q_proj": 4,
        "^model.layers.0.self_attn.k_proj": 1,
        r".*\.layers\.3\..*(q_proj|k_proj|v_proj|o_proj)$": 2,
        r"layers\.(?:1[0-9]|2[0-3])\.mlp\.(gate|up)_proj": 8,
        r"layers\.\d+\.self_attn\.[^v]_proj": 16,
    }
    assert asked(pattern) == tuple(pattern.items())
    assert asked({f"layers.{number}.*": 1 + number % 32 for number in range(128)})[127] == ("layers.127.*", 32)
    assert asked(None) == asked({}) == asked(None, {METADATA_KEY: None}) == asked(None, {"note": "q_proj"}) == ()


@pytest.mark.parametrize(
    ("expression", "ways"),
    [
        ("q_proj", 1),
        (r"layers\.\d+\.q_proj", 64),
        ("(q|k|v)_proj|(?:gate|up)_proj", 2),
        ("(1|10|2)", 2),
        ("(a?b|c)(|d)", 8),
        ("b|.|", 3),
        ("(.|a|a|b)", 3),
        ("a|b", 1),
        ("a?b?", 4),
        (r"[\w.]*x[^a]+", 4096),
        ("((a|b)|c)", 2),
    ],
)
def test_ways_to_match_are_counted(expression: str, ways: int) -> None:
    re.compile(expression)
    assert ways_to_match(expression) == ways


@pytest.mark.parametrize(
    "expression", ["(a)*", "(a)?", "a**", "a*?", "^*", "a{2}", "(?i)a", "(?P<x>a)", r"\1", "[[]", "[]a]"]
)
def test_what_could_be_searched_for_ever_or_is_not_known_is_refused(expression: str) -> None:
    with pytest.raises(ValueError, match="is none of: a character, a set"):
        ways_to_match(expression)


def test_the_ways_of_all_expressions_together_are_bounded() -> None:
    one = ways_to_match(".*a.*")
    assert len(asked({f".*{letter}.*": 4 for letter in "abcdefgh"[: MAX_WAYS // one]})) == MAX_WAYS // one
    with pytest.raises(RequestError, match=r"lora_config.rank_pattern: '.\*c.\*' is not accepted: .* too many ways"):
        asked({f".*{letter}.*": 4 for letter in "abc"})


def test_a_model_from_a_checkpoint_may_ask_for_the_checkpoints_ranks_alone() -> None:
    saved = (("q_proj", 4), ("lm_head", 2))
    for metadata in (None, {}, {"note": "x"}, {METADATA_KEY: '{"q_proj": 4, "lm_head": 2}'}):
        check_same(metadata, saved)
    for other in ('{"lm_head": 2, "q_proj": 4}', "{}"):
        with pytest.raises(
            RequestError, match=rf"user_metadata.{METADATA_KEY}: a model has the ranks of the checkpoint"
        ):
            check_same({METADATA_KEY: other}, saved)
