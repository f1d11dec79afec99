"""The routed experts of `/generate` answers as the loss input `routed_experts` of the trainer (routing replay).

Knows the fields of answers, and the packed form of the loss input (docs/howto/mixtures-of-experts.md). Knows no model:
neither its layers nor its experts per token are needed. Not imported by `skyrl.rollout` itself, because it needs numpy.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from skyrl.base.wire.routed_experts import IN_BYTES, UNRECORDED, packed
from skyrl.rollout.errors import BadAnswer


def routed_experts_input(
    answers: Sequence[Mapping[str, Any]],
    tokens: Sequence[int],
    *,
    per_token: int | None = None,
    experts: int | None = None,
) -> npt.NDArray[np.int64]:
    """The experts of a sequence, `tokens`, of which `model_input` has all but the last one.

    answers: of `/generate`, in the order in which they were sampled. Each one's prompt and sample begin the sequence:
    one answer, or the answers of all turns, or `RolloutAnswer.parts`. If several answers have a row, the first one's is
    taken: the token after the row was sampled with it. Rows that no answer has are -1: the trainer's router chooses
    there. Rows behind the sequence's end are left out.

    With N = len(tokens) - 1: returns int64 [N, ceil(layers * k / 8)], packed; [N, ceil(layers * k / 4)] if the model
    has more than 255 `experts`, which must then be given; with `per_token` (k) [N, layers, k].
    Raises BadAnswer for a record that does not fit its answer's tokens, or has a number below -1. Raises ValueError if
    no answer has a record, if a sample stands at no such place in the sequence, or if an expert's number is too
    large to be packed."""
    found: npt.NDArray[np.int32] | None = None
    for number, answer in reversed([*enumerate(answers)]):
        record = _record(answer, f"answers[{number}]")
        if record is None:
            continue
        _check_place(answer, tokens, f"answers[{number}]")
        start, rows = record
        if found is None:
            found = np.full((len(tokens) - 1, rows.shape[1]), UNRECORDED, np.int32)
        if found.shape[1] != rows.shape[1]:
            raise BadAnswer(
                f"answers[{number}]: {rows.shape[1]} experts per token; a later answer has {found.shape[1]}"
            )
        into = found[start : start + len(rows)]
        into[:] = rows[: len(into)]
    if found is None:
        raise ValueError("answers: none has routed_experts; ask for them with return_routed_experts")
    if per_token is None:
        return packed(found, experts or IN_BYTES)
    if found.shape[1] % per_token:
        raise ValueError(f"per_token: {found.shape[1]} experts per token are no multiple of {per_token}")
    return found.reshape(len(found), found.shape[1] // per_token, per_token).astype(np.int64)


def _check_place(answer: Mapping[str, Any], tokens: Sequence[int], name: str) -> None:
    """The last sampled token has no row, and may be missing: for example an end token that the next turn leaves out."""
    first = answer["meta_info"]["prompt_tokens"]
    sampled = [*answer["output_ids"]][:-1]
    there = [*tokens[first : first + len(sampled)]]
    if first > len(tokens) or there != sampled[: len(there)]:
        raise ValueError(f"{name}: its sample is not what the sequence has from token {first} on")


def _record(answer: Mapping[str, Any], name: str) -> tuple[int, npt.NDArray[np.int32]] | None:
    """The first row, and the rows [rows, layers * k] of an answer; None if it has none."""
    meta = answer["meta_info"]
    if meta.get("routed_experts") is None:
        return None
    start = meta.get("routed_experts_start_len", 0)
    for count in ("prompt_tokens", "completion_tokens"):
        if count not in meta:
            raise BadAnswer(f"{name}: meta_info has routed_experts, but no {count}")
    rows = meta["prompt_tokens"] + meta["completion_tokens"] - 1 - start
    try:
        flat = np.frombuffer(base64.b64decode(meta["routed_experts"], validate=True), "<i4")
    except (binascii.Error, ValueError) as error:
        raise BadAnswer(f"{name}: routed_experts cannot be read: {error}") from error
    if rows <= 0:
        if len(flat):
            raise BadAnswer(f"{name}: routed_experts has {len(flat)} numbers for no token")
        return None
    if not len(flat) or len(flat) % rows:
        raise BadAnswer(f"{name}: routed_experts has {len(flat)} numbers for {rows} tokens")
    if (least := int(flat.min())) < UNRECORDED:
        raise BadAnswer(f"{name}: routed_experts has the number {least}, which is no expert")
    return start, flat.reshape(rows, len(flat) // rows)
