"""Placing is quick because the last request is remembered: it must not change where a request belongs."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sampled_turns import Sampler, call, result, said, user

from skyrl.chat.agents.tree import Place, Tree

MESSAGES = [
    {"role": "system", "content": "help"},
    user("go"),
    user([{"type": "text", "text": "go"}]),
    result("7"),
    said("yes"),
    said("yes", reasoning="hm"),
    call('{"a": 1, "b": 2}'),
    call({"a": 1, "b": 2}),
    call({"b": 2, "a": 1}),
    call({"a": True, "b": 2}),
]
TOOLS: list[dict[str, Any]] = [{}, {"tools": [{"name": "add"}]}]


def placed_anew(sampler: Sampler, setting: dict[str, Any], messages: list[dict[str, Any]]) -> Place:
    """By a tree that has placed no request before."""
    tree = Tree()
    for turn in sampler.tree:
        tree.add(turn, sampler.keep_thinking)
    return tree.place(setting, messages, sampler.keep_thinking)


@given(
    st.lists(st.tuples(st.lists(st.sampled_from(MESSAGES), min_size=1, max_size=5), st.sampled_from(TOOLS))),
    st.booleans(),
)
def test_a_request_belongs_where_it_would_without_memory(requests: list[Any], keep_thinking: bool) -> None:
    sampler = Sampler(random.Random(0), keep_thinking=keep_thinking)
    for messages, setting in requests:
        fresh = copy.deepcopy(messages)
        assert sampler.tree.place(setting, fresh, keep_thinking) == placed_anew(sampler, setting, fresh)
        sampler.ask(fresh, said("yes"), setting=setting)


@pytest.mark.parametrize("returned", [call({"b": 2, "a": 1}), call({"a": True, "b": 2})], ids=["keys", "true"])
def test_objects_that_python_finds_equal_are_not_taken_for_the_same(returned: dict[str, Any]) -> None:
    sampler = Sampler()
    answer = call({"a": 1, "b": 2})
    assert answer == returned
    sampler.ask([user("go")], answer)
    sampler.ask([user("go"), answer, result("3")])
    assert sampler.tree.place({}, [user("go"), returned, result("3")], False).fork == "tool_call_changed"
