"""The tokens that top-k and top-p kept, of `/generate` answers, as loss inputs of the trainer (top-p replay).

Knows the fields of answers. Knows no vocabulary. Not imported by `skyrl.rollout` itself, because it needs numpy.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from skyrl.rollout.errors import BadAnswer

IDS, OFFSETS = "top_p_token_ids", "top_p_token_offsets"
"""In `meta_info`, and as loss inputs."""


def top_p_inputs(answers: Sequence[Mapping[str, Any]], tokens: Sequence[int]) -> dict[str, npt.NDArray[np.int64]]:
    """The loss inputs of a sequence, `tokens`, of which `model_input` has all but the last one, and the targets all but
    the first one.

    answers: of `/generate` with `return_top_p_token_ids`. Each one's prompt and sample begin the sequence: one answer,
    or the answers of all turns, or `RolloutAnswer.parts`. A sampled token that the sequence does not have, such as an
    end token that the next turn leaves out, may only be the last of its answer.

    With N = len(tokens) - 1: returns `top_p_token_ids` int64 [M] and `top_p_token_offsets` int64 [N + 1]. Targets that
    no answer has sampled, and those of answers without a record, have no ids: they are scored over the whole
    vocabulary. Raises BadAnswer for a record that does not fit its answer's tokens; ValueError if no answer has one, or
    if a sample stands at no such place in the sequence."""
    kept: dict[int, npt.NDArray[np.int64]] = {}
    found = False
    for number, answer in enumerate(answers):
        sets = _record(answer, f"answers[{number}]")
        if sets is None:
            continue
        found = True
        first, sampled = answer["meta_info"]["prompt_tokens"], [*answer["output_ids"]]
        there = [*tokens[first : first + len(sampled)]]
        if first < 1 or first > len(tokens) or there[: len(sampled) - 1] != sampled[:-1][: len(there)]:
            raise ValueError(f"answers[{number}]: its sample is not what the sequence has from token {first} on")
        pairs = zip(sets, sampled, there, strict=False)
        kept |= {first - 1 + place: ids for place, (ids, own, token) in enumerate(pairs) if own == token}
    if not found:
        raise ValueError(f"answers: none has {IDS}; ask for them with return_top_p_token_ids")
    of_positions = [kept.get(position, np.zeros(0, np.int64)) for position in range(len(tokens) - 1)]
    ids = np.concatenate(of_positions) if of_positions else np.zeros(0, np.int64)
    return {IDS: ids, OFFSETS: np.cumsum([0, *map(len, of_positions)])}


def _record(answer: Mapping[str, Any], name: str) -> list[npt.NDArray[np.int64]] | None:
    """The kept ids of each sampled token; None if the answer has no record."""
    meta = answer["meta_info"]
    if meta.get(IDS) is None:
        return None
    ids, offsets = (_numbers(meta, field, name) for field in (IDS, OFFSETS))
    count = len(answer["output_ids"])
    if len(offsets) != count + 1 or offsets[0] != 0 or offsets[-1] != len(ids) or (np.diff(offsets) < 0).any():
        raise BadAnswer(f"{name}: {OFFSETS} do not divide {len(ids)} ids among {count} tokens")
    return np.split(ids, offsets[1:-1])[:count]


def _numbers(meta: Mapping[str, Any], field: str, name: str) -> npt.NDArray[np.int64]:
    try:
        return np.frombuffer(base64.b64decode(meta[field], validate=True), "<i4").astype(np.int64)
    except (KeyError, TypeError, binascii.Error, ValueError) as error:
        raise BadAnswer(f"{name}: {field} cannot be read: {error}") from error
