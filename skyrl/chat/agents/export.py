"""A trajectory as trainers read it: its tree of turns as rows, in several forms, in pages that fit one answer.

A row is the path from a first turn to a turn that nothing continues. Each sampled token is trained in one row, the
first that has it: the part that forks share is context in the others. The forms are Tinker's Datums, slime's samples
and verl's fields; turns are also given as lines of JSON.

Routed experts (for routing replay) are those of a mixture that the sampler used for the tokens of a row. vLLM sends a
record for each turn, with all layers of the model. A turn that continues another one has only the rows that the earlier
ones lack.

All pages are of the turns that the first page had: a turn that ends meanwhile would move rows from one page to another.
So a page's `next_offset` names those turns, too.
"""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from skyrl.base.model_files import experts_of, layers_with_experts, model_config
from skyrl.base.types.agents import AgentSession, AgentTurn
from skyrl.base.wire.errors import RequestError
from skyrl.base.wire.routed_experts import UNRECORDED, packed
from skyrl.chat.agents.tree import Tree


@dataclass(frozen=True, slots=True)
class TrainedTurn:
    """A turn of a row: its sampled tokens are those from `start` to `stop`. `trained` is False where an earlier row
    trains them, and where their logprobs are a grammar's (`AgentTurn.own_logprobs`)."""

    turn: AgentTurn
    start: int
    stop: int
    trained: bool


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """`tokens` are ids (int32), `mask` says which are trained, `logprobs` (float32) are those under which tokens were
    sampled, 0 where a token is not trained, `constrained` (bool) says of which a grammar has narrowed the choice; all
    of shape [tokens]. The logprob of a constrained token is the model's own. Where that is not known, all tokens of the
    turn count as constrained, and none is trained."""

    tokens: NDArray[np.int32]
    mask: NDArray[np.bool_]
    logprobs: NDArray[np.float32]
    constrained: NDArray[np.bool_]
    turns: Sequence[TrainedTurn]

    @property
    def prompt(self) -> int:
        """The number of tokens before the first that was sampled."""
        return self.turns[0].start

    @property
    def template_note(self) -> str | None:
        """How the model's template writes a part of the row otherwise; None if the row is as it writes it."""
        return next((each.turn.template_note for each in self.turns[1:] if each.turn.template_note), None)

    @property
    def versions(self) -> list[str]:
        """The weights of each token after the prompt; empty for tokens that were not sampled."""
        versions = [""] * (len(self.tokens) - self.prompt)
        for each in self.turns:
            spans = each.turn.versions
            stops = [*(span.first for span in spans[1:]), each.stop - each.start]
            for span, stop in zip(spans, stops, strict=True):
                at = each.start - self.prompt
                versions[at + span.first : at + stop] = [span.version] * (stop - span.first)
        return versions


def ends_of(tree: Tree) -> list[AgentTurn]:
    """The turns that nothing continues, in the order in which they ended: each is the end of a row."""
    return [turn for turn in tree if not tree.has_child(turn)]


def rows_of(tree: Tree, ends: Sequence[AgentTurn], offset: int, limit: int) -> list[Row]:
    """The rows number `offset` and after, at most `limit`, of those that end with `ends`."""
    seen: set[str] = set()
    for end in ends[:offset]:
        seen.update(turn.id for turn in tree.path(end))
    return [_row(tree.path(end), seen) for end in ends[offset : offset + limit]]


def _row(path: Sequence[AgentTurn], seen: set[str]) -> Row:
    """Adds the turns of the path to `seen`."""
    parts: list[NDArray[np.int32]] = []
    masks: list[NDArray[np.bool_]] = []
    logprobs: list[NDArray[np.float32]] = []
    constrained: list[NDArray[np.bool_]] = []
    turns: list[TrainedTurn] = []
    at = 0
    for turn in path:
        trained = turn.id not in seen and turn.own_logprobs
        seen.add(turn.id)
        start = at + len(turn.added)
        at = start + len(turn.sampled)
        turns.append(TrainedTurn(turn, start, at, trained))
        parts += [turn.added, turn.sampled]
        masks += [np.zeros(len(turn.added), np.bool_), np.full(len(turn.sampled), trained)]
        given = turn.logprobs if trained else np.zeros(len(turn.sampled), np.float32)
        logprobs += [np.zeros(len(turn.added), np.float32), given]
        constrained += [np.zeros(len(turn.added), np.bool_), _constrained(turn)]
    return Row(
        np.concatenate(parts), np.concatenate(masks), np.concatenate(logprobs), np.concatenate(constrained), turns
    )


def _constrained(turn: AgentTurn) -> NDArray[np.bool_]:
    if turn.constrained is not None and turn.own_logprobs:
        return turn.constrained
    return np.full(len(turn.sampled), not turn.own_logprobs)


@dataclass(frozen=True, slots=True)
class Experts:
    """Those of a base model: the numbers of its layers that have any, and how many each of them has."""

    layers: Sequence[int]
    count: int

    @classmethod
    def of(cls, base_model: str) -> Experts | None:
        """None for a dense model, and one whose config.json is not on this machine. Reads a file."""
        config = model_config(base_model)
        count = experts_of(config)
        return cls(layers_with_experts(config), count) if count else None

    def replayed(self, row: Row) -> NDArray[np.int64] | None:
        """The loss input `routed_experts` of a row, packed; None if no turn has a record. Raises RequestError if a
        record is not one of this model."""
        found = recorded(row)
        if found is None:
            return None
        if found.shape[1] <= max(self.layers):
            raise _not_of_this_model(f"a record has {found.shape[1]} layers")
        try:
            return packed(found[:, self.layers].reshape(len(found), -1), self.count)
        except ValueError as error:
            raise _not_of_this_model(str(error)) from error


def recorded(row: Row) -> NDArray[np.int32] | None:
    """int32 [tokens - 1, layers, experts per token], -1 where no turn has a record; None if none has. Where several
    have one, it is that of the first: the token after it was sampled with it. Raises RequestError for records that do
    not fit one another, or their turns."""
    found: NDArray[np.int32] | None = None
    for each in reversed(row.turns):
        if each.turn.routed_experts is None:
            continue
        rows = np.load(io.BytesIO(each.turn.routed_experts), allow_pickle=False)
        if found is None:
            found = np.full((len(row.tokens) - 1, *rows.shape[1:]), UNRECORDED, np.int32)
        start = each.stop - 1 - len(rows)
        if start < 0 or rows.shape[1:] != found.shape[1:]:
            raise _not_of_this_model(f"the record of turn {each.turn.id} has the shape {list(rows.shape)}")
        found[start : each.stop - 1] = rows
    return found


def as_slime(row: Row) -> str | None:
    """The record as SGLang's answers have it, of which slime makes `rollout_routed_experts`: base64 of int32
    [tokens - 1, layers, experts per token]. None if no turn has one."""
    found = recorded(row)
    return None if found is None else base64.b64encode(found.astype("<i4", copy=False).tobytes()).decode()


def _not_of_this_model(what: str) -> RequestError:
    return RequestError(f"the inference server's routed experts do not fit the base model: {what}", status=500)


@dataclass(frozen=True, slots=True)
class About:
    """Of the rows of one session: `advantage` is that of each trained token, `experts` are the base model's; None if it
    is dense."""

    session: AgentSession
    advantage: float
    experts: Experts | None = None


def datum(row: Row, about: About) -> dict[str, Any]:
    """A Datum for `importance_sampling` and `ppo`: position i of the inputs is about token i + 1. `mask` says which
    positions are trained; take it out before `forward_backward`, which knows them by their advantages. With
    `constrained`, to be taken out like `mask`, if the row has constrained tokens. With `routed_experts`, packed, if the
    session kept them, and with the row's `template_note`, if it has one."""
    mask = row.mask[1:]
    inputs = {
        "target_tokens": _tensor(row.tokens[1:], "int64"),
        "logprobs": _tensor(row.logprobs[1:], "float32"),
        "advantages": _tensor(np.where(mask, np.float32(about.advantage), np.float32(0)), "float32"),
        "mask": _tensor(mask.astype(np.float32), "float32"),
    }
    if row.constrained.any():
        inputs["constrained"] = _tensor(row.constrained[1:].astype(np.float32), "float32")
    if about.experts is not None and (replayed := about.experts.replayed(row)) is not None:
        inputs["routed_experts"] = _tensor(replayed, "int64")
    chunk = {"type": "encoded_text", "tokens": row.tokens[:-1].tolist()}
    note = {} if row.template_note is None else {"template_note": row.template_note}
    return {"model_input": {"chunks": [chunk]}, "loss_fn_inputs": inputs} | note


def sample(row: Row, about: About) -> dict[str, Any]:
    """The fields of slime's Sample. `loss_mask`, `rollout_log_probs` and `weight_versions` are of the response, which
    begins with the first sampled token."""
    session, last = about.session, row.turns[-1].turn
    marks = {"constrained": _marks(row)} if row.constrained.any() else {}
    experts = as_slime(row)
    return ({} if experts is None else {"rollout_routed_experts": experts}) | {
        "tokens": row.tokens.tolist(),
        "response_length": len(row.tokens) - row.prompt,
        "loss_mask": row.mask[row.prompt :].astype(int).tolist(),
        "rollout_log_probs": row.logprobs[row.prompt :].tolist(),
        "weight_versions": row.versions,
        "reward": session.reward,
        "status": "truncated" if last.finish_reason == "length" else "completed",
        "metadata": {**session.metadata, "session_id": session.id, "turns": [each.turn.id for each in row.turns]}
        | {"template_note": row.template_note}
        | marks,
    }


def verl(row: Row, about: About) -> dict[str, Any]:
    """The fields of one row of verl's batch, without padding."""
    response = row.tokens[row.prompt :].tolist()
    return ({"constrained": _marks(row)} if row.constrained.any() else {}) | {
        "prompts": row.tokens[: row.prompt].tolist(),
        "responses": response,
        "response_mask": row.mask[row.prompt :].astype(int).tolist(),
        "input_ids": row.tokens.tolist(),
        "attention_mask": [1] * len(row.tokens),
        "position_ids": list(range(len(row.tokens))),
        "rollout_log_probs": row.logprobs[row.prompt :].tolist(),
        "advantages": [about.advantage if trained else 0.0 for trained in row.mask[row.prompt :].tolist()],
        "reward": about.session.reward,
        "uid": about.session.id,
        "template_note": row.template_note,
    }


FORMS: Mapping[str, Callable[[Row, About], dict[str, Any]]] = {
    "datums": datum,
    "samples": sample,
    "verl": verl,
}
"""The forms of rows, by their names."""


def line(turn: AgentTurn) -> dict[str, Any]:
    """A turn with all that is kept of it."""
    shown = {
        "id": turn.id,
        "parent": turn.parent,
        "fork": turn.fork,
        "forked_at": turn.forked_at,
        "template_note": turn.template_note,
        "dialect": turn.dialect,
        "messages": turn.messages,
        "answer": turn.answer,
        "finish_reason": turn.finish_reason,
        "stop_reason": turn.stop_reason,
        "added_tokens": turn.added.tolist(),
        "sampled_tokens": turn.sampled.tolist(),
        "logprobs": turn.logprobs.tolist(),
        "versions": [{"first": span.first, "version": span.version} for span in turn.versions],
        "usage": turn.usage,
        "created_at": turn.created_at,
        "ended_at": turn.ended_at,
    }
    if turn.parent is None:
        shown["setting"] = turn.setting
    if turn.constrained is not None:
        shown["constrained"] = turn.constrained.astype(int).tolist()
    if not turn.own_logprobs:
        shown["own_logprobs"] = False
    if turn.routed_experts is not None:
        shown["routed_experts"] = base64.b64encode(turn.routed_experts).decode()
    return shown


def _marks(row: Row) -> list[int]:
    """Which tokens of the response are constrained."""
    return row.constrained[row.prompt :].astype(int).tolist()


def _tensor(values: NDArray[Any], dtype: str) -> dict[str, Any]:
    return {"data": values.ravel().tolist(), "dtype": dtype, "shape": list(values.shape)}


MAX_PAGE_BYTES = 64 * 2**20
"""Of a page of rows or turns, about: fewer are given if they are longer."""
BYTES_PER_TOKEN = 40
"""Of a token in a row as JSON, at most: its id, target, mask, advantage and logprob."""
BYTES_OF_A_RECORD = 6
"""Of routed experts in a row as JSON, for each byte that vLLM sends, at most."""
_OFFSET = re.compile(r"(\d{1,9})(?:-(\d{1,9})-([0-9a-f]{16}))?")


@dataclass(frozen=True, slots=True)
class PageStart:
    """Where a page begins: with row or turn `offset` of the first `turns` turns of a session, whose digest is `digest`.
    Without `turns` the page is of all turns that there are."""

    offset: int = 0
    turns: int | None = None
    digest: str = ""

    @classmethod
    def read(cls, offset: str) -> PageStart:
        """From the field `offset` of a request: the `next_offset` of a page, or a number. Raises RequestError."""
        if (found := _OFFSET.fullmatch(offset)) is None:
            raise RequestError("must be the next_offset of a page, or a number", field="offset")
        return cls(int(found[1]), None if found[2] is None else int(found[2]), found[3] or "")

    def turns_of(self, turns: Sequence[AgentTurn], *, is_open: bool) -> Sequence[AgentTurn]:
        """The turns that the page is of. Raises RequestError 409 if they are not known."""
        if self.turns is None and self.offset and is_open:
            raise RequestError(
                "the session is open, so that its rows may have moved since the page before: ask with the next_offset "
                "of that page, or end the session first",
                field="offset",
                status=409,
            )
        if self.turns is None:
            return turns
        seen = turns[: self.turns]
        if len(seen) < self.turns or _digest(seen) != self.digest:
            raise RequestError(
                "the session has other turns than when the page before was read: begin again without an offset",
                field="offset",
                status=409,
            )
        return seen


def page_of_rows(turns: Sequence[AgentTurn], about: About, form: str, start: PageStart, limit: int) -> dict[str, Any]:
    """The rows from `start` on of a session with these turns. `form` is one of `FORMS`. Raises RequestError."""
    seen = start.turns_of(turns, is_open=about.session.ended_at is None)
    tree = Tree()
    for turn in seen:
        tree.add(turn, about.session.keep_thinking)
    ends = ends_of(tree)
    left, fitting = MAX_PAGE_BYTES, 0
    for end in ends[start.offset : start.offset + limit]:
        records = sum(len(turn.routed_experts or b"") for turn in tree.path(end))
        left -= BYTES_PER_TOKEN * tree.length(end) + BYTES_OF_A_RECORD * records
        if left < 0 and fitting:
            break
        fitting += 1
    make = FORMS[form]
    return _page([make(row, about) for row in rows_of(tree, ends, start.offset, fitting)], len(ends), start, seen)


def page_of_turns(turns: Sequence[AgentTurn], start: PageStart, limit: int, *, is_open: bool) -> dict[str, Any]:
    """The turns from `start` on, as lines of JSON. Raises RequestError."""
    seen = start.turns_of(turns, is_open=is_open)
    lines: list[dict[str, Any]] = []
    size = 0
    for turn in seen[start.offset : start.offset + limit]:
        shown = line(turn)
        size += len(msgspec.json.encode(shown))
        if size > MAX_PAGE_BYTES and lines:
            break
        lines.append(shown)
    return _page(lines, len(seen), start, seen)


def _page(rows: list[dict[str, Any]], total: int, start: PageStart, turns: Sequence[AgentTurn]) -> dict[str, Any]:
    end = start.offset + len(rows)
    following = f"{end}-{len(turns)}-{_digest(turns)}" if end < total else None
    return {"rows": rows, "total": total, "next_offset": following}


def _digest(turns: Sequence[AgentTurn]) -> str:
    return blake2b(" ".join(turn.id for turn in turns).encode(), digest_size=8).hexdigest()
