"""Where a request belongs in a session's tree of turns, and why it forks: each source of drift by its name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sampled_turns import Sampler, call, result, said, user

from skyrl.chat.agents.tree import fingerprint_of, request_key, setting_of

SYSTEM = {"role": "system", "content": "help"}
ASK, YES = user("boats?"), said("yes")
NEXT = user("and now?")


def begun(*answers: dict[str, Any], keep_thinking: bool = False) -> tuple[Sampler, list[dict[str, Any]]]:
    """A session with a system prompt, and one turn for each answer; and all its messages."""
    sampler, messages = Sampler(keep_thinking=keep_thinking), [SYSTEM]
    for number, answer in enumerate(answers or (YES,)):
        messages.append(result(f"r{number}") if messages[-1].get("tool_calls") else user(f"question {number}"))
        sampler.ask(messages, answer)
        messages.append(answer)
    return sampler, messages


def placed(sampler: Sampler, messages: list[dict[str, Any]], setting: dict[str, Any] | None = None) -> tuple[Any, ...]:
    """The parent's id, the number of new messages, why it forks, and at which message."""
    place = sampler.tree.place(setting or {}, messages, sampler.keep_thinking)
    return None if place.parent is None else place.parent.id, len(place.new), place.fork, place.forked_at


def test_the_first_turn_has_no_parent_and_is_no_fork() -> None:
    assert placed(Sampler(), [SYSTEM, ASK]) == (None, 2, None, None)


def test_the_next_turn_continues_the_newest() -> None:
    sampler, messages = begun(YES, said("no"))
    assert placed(sampler, [*messages, NEXT]) == ("t1", 1, None, None)
    turn = sampler.ask([*messages, NEXT])
    assert sampler.tree.messages_of(turn) == [*messages, NEXT]
    tokens = sampler.tree.tokens_of(turn).tolist()
    assert tokens == sampler.said[2].context + sampler.said[2].sampled
    assert sampler.tree.length(turn) == len(tokens) == sampler.tree.tokens


def test_the_same_text_in_another_split_of_tokens_is_the_same_message() -> None:
    sampler, messages = begun()
    again = sampler.ids([YES["content"] * 50]).tolist()
    assert again != sampler.ids([YES["content"] * 50]).tolist(), "the sampler splits at random"
    assert placed(sampler, [*messages, NEXT])[0] == "t0"


@pytest.mark.parametrize(
    ("given", "returned"),
    [
        (said("  Three boats.\n"), said("Three boats.")),
        (said("one\ntwo"), said("", content=[{"type": "text", "text": "one"}, {"type": "text", "text": "two"}])),
        (said("one"), said("", content=[{"type": "text", "text": "one"}, {"type": "text", "text": ""}])),
        (said("yes", reasoning="I think\n"), said("yes", reasoning_content="I think")),
        (call('{"a": 1}'), call({"a": 1})),
        (call('{"a": 1.0, "b": [2.0, 1e2]}'), call('{"a":1,"b":[2,100]}')),
        (call('{"a": "\\u00e4"}'), call('{"a":"ä"}')),
        (call('{"a": 1}', call_id="c1"), call('{"a": 1}', call_id="toolu_9")),
        (call("no JSON {"), call("no JSON {")),
        (call(""), call("{}")),
        (call(None), call({})),
        (said(None, tool_calls=call("{}")["tool_calls"]), said("", tool_calls=call("{}")["tool_calls"])),
    ],
    ids=[
        "stripped",
        "split",
        "empty part",
        "thinking",
        "object",
        "numbers",
        "escapes",
        "ids",
        "no JSON",
        "empty",
        "none",
        "no content",
    ],
)
def test_an_answer_that_comes_back_in_another_form_is_continued(given: Any, returned: Any) -> None:
    sampler, messages = begun(given)
    assert placed(sampler, [*messages[:-1], returned, NEXT]) == ("t0", 1, None, None)


def test_text_blocks_that_a_client_merges_or_marks_are_the_same() -> None:
    sampler = Sampler()
    blocks = [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "b"}]
    sampler.ask([user(blocks)], "yes")
    assert placed(sampler, [user("a\nb"), YES, NEXT]) == ("t0", 1, None, None)


@pytest.mark.parametrize(
    ("answer", "returned", "fork"),
    [
        (call('{"a": 1, "b": 2}'), call('{"b": 2, "a": 1}'), "tool_call_changed"),
        (call('{"a": 1}'), call('{"a": 2}'), "tool_call_changed"),
        (call('{"a": 1}'), call('{"a": true}'), "tool_call_changed"),
        (said("yes", reasoning="I think"), said("yes"), "thinking_changed"),
        (said("yes", reasoning="I think"), said("yes", reasoning="I thought"), "thinking_changed"),
        (said("yes and no"), said("yes"), "answer_changed"),
    ],
    ids=["keys", "value", "true is not 1", "dropped thinking", "other thinking", "a stop string is cut"],
)
def test_an_answer_that_was_changed_forks_at_it(answer: Any, returned: Any, fork: str) -> None:
    sampler, messages = begun(YES, answer)
    assert placed(sampler, [*messages[:-1], returned, NEXT]) == ("t0", 3, fork, 4)


def test_dropped_thinking_is_no_fork_where_it_is_kept() -> None:
    sampler, messages = begun(said("yes", reasoning="I think"), keep_thinking=True)
    assert placed(sampler, [*messages[:-1], YES, NEXT]) == ("t0", 1, None, None)


def test_a_tool_result_that_is_cut_forks_at_it() -> None:
    sampler, messages = begun(call("{}"), YES)
    assert placed(sampler, [*messages[:3], result("r"), YES, NEXT]) == ("t0", 3, "tool_result_changed", 3)
    assert placed(sampler, [*messages[:3], result("r")]) == ("t0", 1, "tool_result_changed", 3)


def test_a_system_message_that_changes_forks_at_the_beginning() -> None:
    sampler, messages = begun(YES, YES)
    changed = SYSTEM | {"content": "help; it is noon"}
    assert placed(sampler, [changed, *messages[1:], NEXT]) == (None, 6, "system_changed", 0)


def test_a_system_message_in_the_middle_that_changes_forks_there() -> None:
    sampler = Sampler()
    noon, one = ({"role": "system", "content": text} for text in ("noon", "one"))
    sampler.ask([ASK], YES)
    sampler.ask([ASK, YES, noon, NEXT], YES)
    assert placed(sampler, [ASK, YES, one, NEXT, YES, NEXT]) == ("t0", 4, "system_changed", 2)


def test_a_question_that_changes_forks_at_it() -> None:
    sampler, messages = begun(YES, YES)
    assert placed(sampler, [SYSTEM, user("other"), *messages[2:], NEXT]) == (None, 6, "user_changed", 1)


def test_a_compaction_says_that_messages_were_dropped() -> None:
    sampler, _ = begun(YES, YES, YES)
    assert placed(sampler, [SYSTEM, user("summary: boats")]) == (None, 2, "messages_dropped", 1)


def test_messages_that_are_left_out_in_the_middle_are_dropped() -> None:
    sampler, messages = begun(YES, said("no"), YES)
    fork = placed(sampler, [*messages[:3], *messages[5:], NEXT])
    assert fork[:2] == ("t0", 3)
    assert fork[2] in ("messages_dropped", "user_changed")
    assert fork[3] == 3


def test_a_message_that_is_put_between_is_inserted() -> None:
    sampler, messages = begun(YES, YES)
    reminder = {"role": "system", "content": "keep going"}
    assert placed(sampler, [*messages[:3], reminder, *messages[3:], NEXT]) == ("t0", 4, "messages_inserted", 3)


def test_other_tools_begin_anew() -> None:
    sampler, messages = begun()
    tools = {"tools": [{"type": "function", "function": {"name": "add"}}]}
    assert placed(sampler, [*messages, NEXT], tools) == (None, 4, "tools_changed", 0)


def test_two_requests_from_one_beginning_are_branches() -> None:
    sampler, messages = begun()
    sampler.ask([*messages, user("left")])
    assert placed(sampler, [*messages, user("right")]) == ("t0", 1, "branch", 3)


def test_the_same_request_with_other_options_is_a_branch() -> None:
    sampler, messages = begun(YES, YES)
    assert placed(sampler, messages[:4])[2] == "branch"
    turn = sampler.ask(messages[:4], temperature=0.5)
    assert sampler.tree.answered(turn.key) == [turn]


def test_fewer_messages_than_were_asked_are_dropped() -> None:
    sampler = Sampler()
    sampler.ask([SYSTEM, ASK, NEXT])
    assert placed(sampler, [SYSTEM, ASK]) == (None, 2, "messages_dropped", 2)


def test_a_request_that_is_repeated_has_the_key_of_its_turn() -> None:
    sampler, messages = begun(YES, YES)
    place = sampler.tree.place({}, messages[:4], False)
    assert [turn.id for turn in sampler.tree.answered(request_key(place.prefix, {}))] == ["t1"]
    again = sampler.ask(messages[:4], said("no"))
    assert (again.attempt, again.parent) == (1, "t0")
    assert [turn.id for turn in sampler.tree.answered(again.key)] == ["t1", "t2"]


def test_either_of_two_answers_to_one_request_is_continued() -> None:
    sampler, messages = begun(YES)
    sampler.ask(messages[:2], said("no"))
    assert placed(sampler, [*messages[:2], YES, NEXT]) == ("t0", 1, None, None)
    assert placed(sampler, [*messages[:2], said("no"), NEXT]) == ("t1", 1, None, None)


def test_an_answer_cut_by_length_goes_on_without_tokens_between() -> None:
    sampler = Sampler()
    sampler.ask([ASK], said("one, two"), finish="length")
    assert placed(sampler, [ASK, said("one, two")]) == ("t0", 0, None, None)
    turn = sampler.ask([ASK, said("one, two")], said(", three"))
    assert len(turn.added) == 0
    first, second = sampler.said
    assert sampler.tree.tokens_of(turn).tolist() == first.context + first.sampled + second.sampled


def test_an_answer_that_ended_is_not_gone_on_with() -> None:
    sampler, messages = begun(YES, said("no"))
    assert placed(sampler, messages)[:2] == ("t0", 2)


@pytest.mark.parametrize("role", ["system", "developer"])
def test_a_subagent_with_its_own_prompt_leaves_the_conversation_as_it_is(role: str) -> None:
    sampler, messages = begun(YES, said("no"), YES)
    own = {"role": role, "content": "search"}
    turn = sampler.ask([own, user("find")])
    assert (turn.parent, turn.fork, turn.forked_at) == (None, "system_changed", 0)
    assert placed(sampler, [own, user("find"), YES, NEXT]) == ("t3", 1, None, None)
    assert placed(sampler, [*messages, NEXT]) == ("t2", 1, None, None)


def test_a_system_message_before_a_conversation_without_one_is_inserted() -> None:
    sampler = Sampler()
    sampler.ask([ASK])
    assert placed(sampler, [SYSTEM, ASK, YES, NEXT])[2:] == ("messages_inserted", 0)
    assert placed(sampler, [SYSTEM, NEXT])[2:] == ("system_changed", 0)


def test_a_conversation_without_the_system_message_has_dropped_it() -> None:
    sampler, messages = begun(YES, YES)
    assert placed(sampler, [*messages[1:], NEXT])[2:] == ("messages_dropped", 0)


def test_a_summary_in_a_system_message_is_a_compaction() -> None:
    sampler, _ = begun(YES, YES, YES)
    summary = {"role": "system", "content": "summary: boats"}
    assert placed(sampler, [SYSTEM, summary, NEXT]) == (None, 3, "messages_dropped", 1)


def test_another_first_question_in_a_conversation_as_long_is_a_changed_user_message() -> None:
    sampler = Sampler()
    sampler.ask([ASK])
    assert placed(sampler, [NEXT]) == (None, 1, "user_changed", 0)


@pytest.mark.parametrize(("first", "second"), [(True, 1), (1, True), (False, 0)])
def test_a_value_of_another_type_is_a_change_when_a_request_is_compared_with_the_last_one(
    first: Any, second: Any
) -> None:
    sampler = Sampler()
    sampler.ask([ASK, call({"a": first}), NEXT])
    assert placed(sampler, [ASK, call({"a": first}), NEXT, YES, NEXT])[0] == "t0"
    assert placed(sampler, [ASK, call({"a": second}), NEXT, YES, NEXT]) == (None, 5, "tool_call_changed", 1)


def test_a_turn_is_added_once() -> None:
    sampler, _ = begun()
    turn = next(iter(sampler.tree))
    tokens, size = sampler.tree.tokens, sampler.tree.nbytes
    sampler.tree.add(turn, False)
    assert (len(sampler.tree), sampler.tree.tokens, sampler.tree.nbytes) == (1, tokens, size)
    assert np.array_equal(sampler.tree.tokens_of(turn), np.concatenate([turn.added, turn.sampled]))


def test_options_that_change_the_answer_change_the_key() -> None:
    plain = request_key(b"p", {"model": "m", "messages": []})
    same = {"model": "other", "stream": True, "stream_options": {}, "user": "u", "metadata": {"a": 1}, "top_p": None}
    assert request_key(b"p", same) == plain
    changed = [
        {"temperature": 0.5},
        {"top_p": 0.5},
        {"max_tokens": 5},
        {"stop": ["x"]},
        {"seed": 1},
        {"n": 2},
        {"tool_choice": "none"},
        {"response_format": {"type": "json_object"}},
        {"logprobs": True},
    ]
    keys = {plain, request_key(b"q", {}), *(request_key(b"p", each) for each in changed)}
    assert len(keys) == len(changed) + 2


def test_the_setting_is_what_a_template_reads_beside_the_messages() -> None:
    fields = {"tools": [], "temperature": 1, "reasoning_effort": "low", "chat_template_kwargs": {}, "documents": None}
    assert setting_of(fields) == {"reasoning_effort": "low"}


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"role": 5, "content": 7},
        {"role": "assistant", "tool_calls": 5},
        {"role": "assistant", "tool_calls": [5, {"function": "x"}, {"function": {"name": None, "arguments": 5}}]},
        {"role": "user", "content": [5, {"type": "text", "text": ["x"]}, {"type": "image"}]},
        call('{"a":' * 3000 + "1" + "}" * 3000),
        call('{"a": "\\ud800"}'),
        call("9" * 5000),
    ],
)
def test_a_damaged_message_has_a_print_too(message: dict[str, Any]) -> None:
    assert len(fingerprint_of(message).digest(keep_thinking=False)) == 16
