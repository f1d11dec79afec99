"""Rows of a trajectory in the forms that trainers read: Tinker's Datums, slime's samples, verl's fields; and turns as
lines of JSON."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from skyrl.base.types.agents import AgentSession, AgentTurn
from skyrl.server.agents.experts import Experts, as_slime
from skyrl.server.agents.rows import Row


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
