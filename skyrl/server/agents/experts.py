"""The experts of a mixture that the sampler used for the tokens of a row (routing replay), as trainers take them.

vLLM sends a record for each turn, with all layers of the model. A turn that continues another one has only the rows
that the earlier ones lack.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from skyrl.base.model_files import experts_of, layers_with_experts, model_config
from skyrl.base.wire.errors import RequestError
from skyrl.base.wire.routed_experts import UNRECORDED, packed
from skyrl.server.agents.rows import Row


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
