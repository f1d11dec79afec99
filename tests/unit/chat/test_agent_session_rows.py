"""The rows of a trajectory against a list of all that was sampled, for random conversations; and their exports."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from one_turn import turn as a_turn
from sampled_turns import END, Sampler, call, result, said, user

from skyrl.base.types.agents import AgentLimits, AgentSession, VersionSpan
from skyrl.base.types.weights import BaseWeights
from skyrl.base.wire.training import decode_forward_backward
from skyrl.chat.agents.export import FORMS, About, Row, ends_of, line, rows_of
from skyrl.chat.agents.tree import fingerprint_of

SESSION = AgentSession(
    id="s",
    tenant="t",
    name="n",
    model="m",
    base_model="b",
    weights=BaseWeights(),
    follows="pinned",
    limits=AgentLimits(100, 10_000, 60, 60),
    created_at=0.0,
    used_at=0.0,
    metadata={"task": 7},
    reward=0.5,
)
WORDS = st.sampled_from(["", "boats", "a longer text with words", " yes \n", "ä"])
ARGUMENTS = ['{"a": 1, "b": 2}', '{"b": 2, "a": 1}', {"a": 1.0, "b": 2}, "no JSON"]
STEPS = ("continue", "repeat", "back", "edit", "drop", "compact", "insert", "cut", "go on", "tools", "parallel")


def all_rows(sampler: Sampler) -> list[Row]:
    ends = ends_of(sampler.tree)
    return rows_of(sampler.tree, ends, 0, len(ends))


def an_answer(draw: st.DrawFn) -> dict[str, Any]:
    if draw(st.booleans()):
        return call(draw(st.sampled_from(ARGUMENTS)))
    thinking = draw(st.sampled_from([{}, {"reasoning": "hm"}, {"reasoning": "so"}]))
    return said(draw(WORDS), **thinking)


def a_message(draw: st.DrawFn) -> dict[str, Any]:
    return draw(st.sampled_from([user, result]))(draw(WORDS))


@st.composite
def sessions(draw: st.DrawFn) -> Sampler:
    """A session whose client does all that clients do."""
    sampler = Sampler(random.Random(draw(st.integers(0, 99))), keep_thinking=draw(st.booleans()))
    messages, setting = [{"role": "system", "content": "help"}, user("go")], {}
    histories = [list(messages)]
    for step in draw(st.lists(st.sampled_from(STEPS), max_size=14)):
        at = draw(st.integers(0, len(messages) - 1))
        match step:
            case "continue":
                messages = [*messages, a_message(draw)]
            case "back":
                messages = list(draw(st.sampled_from(histories)))
            case "edit":
                changed = an_answer(draw) if messages[at]["role"] == "assistant" else a_message(draw)
                messages = [*messages[:at], changed, *messages[at + 1 :]]
            case "drop":
                messages = [*messages[:at], *messages[at + 1 :]] if len(messages) > 1 else messages
            case "compact":
                messages = [messages[0], user("summary")]
            case "insert":
                messages = [*messages[:at], a_message(draw), *messages[at:]]
            case "tools":
                setting = {"tools": [{"name": draw(WORDS)}]}
            case "parallel":
                sampler.ask([*messages, a_message(draw)], an_answer(draw), setting=setting)
        answer = an_answer(draw)
        sampler.ask(messages, answer, setting=setting, finish="length" if step in ("cut", "go on") else "stop")
        histories.append(list(messages))
        if step != "repeat":
            messages = [*messages, answer]
        if step in ("continue", "parallel"):
            messages = [*messages, a_message(draw)]
    return sampler


@given(sessions())
def test_each_sampled_token_is_trained_once_in_its_own_context(sampler: Sampler) -> None:
    """The sampler gives each sampled token a logprob of its own, by which the oracle knows it again."""
    expected = {
        logprob: (tuple(each.context + each.sampled[:at]), each.sampled[at])
        for each in sampler.said
        for at, logprob in enumerate(each.logprobs)
    }
    trained = dict[float, tuple[tuple[int, ...], int]]()
    for row in all_rows(sampler):
        tokens = row.tokens.tolist()
        assert not row.logprobs[~row.mask].any()
        assert row.mask.any(), "each row trains something"
        for at in np.flatnonzero(row.mask).tolist():
            logprob = float(row.logprobs[at])
            assert logprob not in trained, "trained twice"
            trained[logprob] = (tuple(tokens[:at]), tokens[at])
    assert trained == expected


@given(sessions())
def test_a_turns_context_is_what_the_tree_says(sampler: Sampler) -> None:
    for turn, told in zip(sampler.tree, sampler.said, strict=True):
        assert sampler.tree.tokens_of(turn).tolist() == told.context + told.sampled
        assert sampler.tree.length(turn) == len(told.context) + len(told.sampled)
    assert sampler.tree.tokens == sum(len(turn.added) + len(turn.sampled) for turn in sampler.tree)


@given(sessions())
def test_a_turn_continues_the_longest_turn_that_its_request_begins_with(sampler: Sampler) -> None:
    def seen(messages: Sequence[dict[str, Any]]) -> list[bytes]:
        return [fingerprint_of(message).digest(keep_thinking=sampler.keep_thinking) for message in messages]

    turns = list(sampler.tree)
    whole = [seen([*sampler.tree.messages_of(turn), turn.answer]) for turn in turns]
    for number, (turn, told) in enumerate(zip(turns, sampler.said, strict=True)):
        asked = seen(told.messages)
        assert asked == seen(sampler.tree.messages_of(turn))
        begin_it = {  # the newest turn for each length
            len(before): turns[at]
            for at, before in enumerate(whole[:number])
            if sampler.said[at].setting == told.setting and asked[: len(before)] == before
        }
        if len(asked) in begin_it and begin_it[len(asked)].finish_reason != "length":
            del begin_it[len(asked)]
        parent = 0 if turn.parent is None else len(whole[int(turn.parent[1:])])
        assert parent == max(begin_it, default=0)


@given(sessions(), st.integers(1, 4))
def test_pages_of_rows_are_the_same_rows(sampler: Sampler, size: int) -> None:
    ends, whole = ends_of(sampler.tree), all_rows(sampler)
    pages = [row for at in range(0, len(ends), size) for row in rows_of(sampler.tree, ends, at, size)]
    assert len(pages) == len(whole)
    for one, other in zip(pages, whole, strict=True):
        assert np.array_equal(one.tokens, other.tokens)
        assert np.array_equal(one.mask, other.mask)
        assert np.array_equal(one.logprobs, other.logprobs)


def forked() -> Sampler:
    """Two turns in a row, and a branch from the first."""
    sampler = Sampler()
    sampler.ask([user("go")], "yes")
    sampler.ask([user("go"), said("yes"), user("left")], "one", finish="length")
    sampler.ask([user("go"), said("yes"), user("right")], "two")
    return sampler


def test_what_forks_share_is_context_in_the_second() -> None:
    first, second = all_rows(forked())
    assert [each.trained for each in first.turns] == [True, True]
    assert [each.trained for each in second.turns] == [False, True]
    shared = second.turns[0]
    assert not second.mask[shared.start : shared.stop].any()


def test_each_token_has_the_version_that_sampled_it() -> None:
    row = all_rows(forked())[0]
    turn = row.turns[1].turn
    object.__setattr__(turn, "versions", (VersionSpan(0, "v1"), VersionSpan(1, "v2")))
    versions = row.versions
    assert len(versions) == len(row.tokens) - row.prompt
    start = row.turns[1].start - row.prompt
    assert versions[: row.turns[0].stop - row.prompt] == ["v1"] * len(row.turns[0].turn.sampled)
    assert versions[start - len(turn.added) : start] == [""] * len(turn.added)
    assert versions[start:] == ["v1"] + ["v2"] * (len(turn.sampled) - 1)


def test_a_datum_is_about_the_next_token() -> None:
    row = all_rows(forked())[1]
    data = {"data": [FORMS["datums"](row, About(SESSION, 2.0))], "loss_fn": "importance_sampling"}
    body = json.dumps({"model_id": "m", "forward_backward_input": data}).encode()
    command = decode_forward_backward(body, "json", forward_only=False)
    inputs = {name: tensor.tolist() for name, tensor in command.loss_inputs[0].items()}
    assert command.tokens[0].tolist() == row.tokens[:-1].tolist()
    assert inputs["target_tokens"] == row.tokens[1:].tolist()
    assert inputs["logprobs"] == row.logprobs[1:].tolist()
    assert inputs["mask"] == row.mask[1:].astype(float).tolist()
    assert inputs["advantages"] == (2.0 * row.mask[1:]).tolist()
    assert [token for token, trained in zip(inputs["target_tokens"], inputs["mask"], strict=True) if trained][-1] == END


def test_a_sample_has_slimes_fields() -> None:
    cut, whole = (FORMS["samples"](row, About(SESSION, 2.0)) for row in all_rows(forked()))
    assert (cut["status"], whole["status"]) == ("truncated", "completed")
    assert cut["reward"] == 0.5
    assert cut["metadata"]["task"] == 7
    size = cut["response_length"]
    assert {len(cut[name]) for name in ("loss_mask", "rollout_log_probs", "weight_versions")} == {size}
    assert set(cut["weight_versions"]) == {"v1", ""}
    assert all(cut["weight_versions"][at] for at, trained in enumerate(cut["loss_mask"]) if trained)


def test_a_row_has_verls_fields() -> None:
    row = all_rows(forked())[1]
    fields = FORMS["verl"](row, About(SESSION, 2.0))
    assert fields["prompts"] + fields["responses"] == fields["input_ids"] == row.tokens.tolist()
    assert {len(fields[n]) for n in ("responses", "response_mask", "rollout_log_probs", "advantages")} == {
        len(row.tokens) - row.prompt
    }
    assert fields["advantages"] == [2.0 * trained for trained in fields["response_mask"]]


def test_a_line_has_all_of_a_turn() -> None:
    sampler = forked()
    lines = [json.loads(json.dumps(line(turn))) for turn in sampler.tree]
    assert [each["fork"] for each in lines] == [None, None, "branch"]
    assert [each["parent"] for each in lines] == [None, "t0", "t0"]
    assert lines[2]["sampled_tokens"] == sampler.said[2].sampled
    assert lines[2]["logprobs"] == sampler.said[2].logprobs
    assert lines[2]["messages"] == [user("right")]
    assert ["setting" in each for each in lines] == [True, False, False]


def test_the_documentation_names_each_field_of_a_line() -> None:
    page = (Path(__file__).parents[3] / "docs/howto/agents.md").read_text()
    section = page.partition("### The fields of `jsonl`\n")[2].partition("\n##")[0]
    first_cells = [row.split("|")[1] for row in section.splitlines() if row.startswith("| `")]
    documented = {name for cell in first_cells for name in re.findall(r"`(\w+)`", cell)}
    narrowed = {"constrained": np.ones(1, np.bool_), "own_logprobs": False}
    turns = [line(each) for each in (a_turn(1), replace(a_turn(1), parent="t0", routed_experts=b"x", **narrowed))]
    assert documented == turns[0].keys() | turns[1].keys()
