"""A chat completion as blocks, in pieces that a stream may bring."""

from __future__ import annotations

import pytest

from skyrl.base.wire.errors import RequestError
from skyrl.chat.dialects.dialect import AssistantDelta, Blocks, CallPiece, Function


def blocks_of(*pieces: AssistantDelta) -> list[tuple[str, str]]:
    """The kinds and texts of the blocks. Each must begin, have its text and end before the next begins."""
    blocks = Blocks()
    steps = [step for piece in pieces for step in blocks.add(piece)] + blocks.end()
    told: list[tuple[str, str]] = []
    texts: dict[int, str] = {}
    for step in steps:
        number = step.block.number
        if step.what == "begin":
            assert number == len(texts)
            texts[number] = ""
        elif step.what == "more":
            assert number == len(texts) - 1
            texts[number] += step.more
        else:
            told.append((step.block.kind, texts[number]))
    assert told == [(block.kind, block.text) for block in blocks.all]
    return told


def call(index: int, arguments: str = "", name: str | None = None) -> AssistantDelta:
    return AssistantDelta(
        tool_calls=[CallPiece(Function(name, arguments), index, id=None if name is None else f"c{index}")]
    )


def test_white_space_alone_is_no_block_and_none_of_a_text_is_lost() -> None:
    assert blocks_of(AssistantDelta(content="\n"), AssistantDelta(content=" ")) == []
    assert blocks_of(
        AssistantDelta(reasoning="hm", content="\n\n"), call(0, "{}", "add"), AssistantDelta(content="\n")
    ) == [
        ("thinking", "hm"),
        ("call", "{}"),
    ]
    assert blocks_of(
        AssistantDelta(content="\n"),
        AssistantDelta(content="a "),
        call(0, "{}", "add"),
        AssistantDelta(content="\n"),
        call(0, "x"),
    ) == [
        ("text", "\na "),
        ("call", "{}x"),
    ]
    assert blocks_of(
        AssistantDelta(content="a"), call(0, "{}", "add"), AssistantDelta(content="\n"), AssistantDelta(content="b")
    ) == [
        ("text", "a"),
        ("call", "{}"),
        ("text", "\nb"),
    ]


def test_thinking_after_a_text_is_a_block_of_its_own() -> None:
    assert blocks_of(AssistantDelta(reasoning="a"), AssistantDelta(content="b"), AssistantDelta(reasoning="c")) == [
        ("thinking", "a"),
        ("text", "b"),
        ("thinking", "c"),
    ]


def test_calls_of_one_chunk_and_calls_without_a_function() -> None:
    both = AssistantDelta(tool_calls=[CallPiece(Function("add", "{"), 0), CallPiece(Function("sub", "{}"), 1)])
    assert blocks_of(both, AssistantDelta(tool_calls=[CallPiece(index=1)])) == [("call", "{"), ("call", "{}")]


def test_a_call_without_an_id_gets_one() -> None:
    blocks = Blocks()
    blocks.add(AssistantDelta(tool_calls=[CallPiece(Function("add", "{}")), CallPiece(Function("add", "{}"))]))
    assert len({block.call_id for block in blocks.all} - {""}) == 2


@pytest.mark.parametrize(
    "pieces",
    [
        (call(0, "{}"),),
        (call(0, "{", "add"), call(1, "{}", "sub"), call(0, "}")),
        (call(0, "{", "add"), AssistantDelta(content="a"), call(0, "}")),
    ],
)
def test_pieces_that_fit_no_open_call_are_an_error_of_the_server_and_not_lost(
    pieces: tuple[AssistantDelta, ...],
) -> None:
    with pytest.raises(RequestError) as error:
        blocks_of(*pieces)
    assert error.value.status == 503
