"""The tokens of a trajectory as the trainer takes them.

A row is one path through the session's tree of turns. Tokens that several paths share are trained in one of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from skyrl.agents.errors import BadAnswer

if TYPE_CHECKING:
    from tinker import types


@dataclass(frozen=True, eq=False)
class Row:
    """`tokens` (int64), `mask` (bool: trained here) and `logprobs` (float32, those under which the tokens were sampled;
    0 where the mask is False) have the same shape [n], n at least 2. The first token is never trained."""

    tokens: NDArray[np.int64]
    mask: NDArray[np.bool_]
    logprobs: NDArray[np.float32]

    def datum(self, advantage: float) -> types.Datum:
        """For the losses `importance_sampling`, `ppo` and `cispo`: position i of the inputs is about token i + 1."""
        from tinker import types  # only here: a caller that trains elsewhere does not need it

        inputs = {
            "target_tokens": types.TensorData.from_numpy(self.tokens[1:]),
            "logprobs": types.TensorData.from_numpy(self.logprobs[1:]),
            "advantages": types.TensorData.from_numpy(self.mask[1:].astype(np.float32) * np.float32(advantage)),
        }
        return types.Datum(model_input=types.ModelInput.from_ints(self.tokens[:-1].tolist()), loss_fn_inputs=inputs)


class _Sample(msgspec.Struct):
    """A row in slime's names. The last `response_length` tokens begin with the first that was sampled."""

    tokens: list[int]
    response_length: int
    loss_mask: list[int]
    rollout_log_probs: list[float]


def rows_of(samples: Iterable[dict[str, Any]]) -> list[Row]:
    """Rows from the server's JSON of the format `samples`. Raises BadAnswer."""
    return [_row(sample) for sample in samples]


def _row(sample: dict[str, Any]) -> Row:
    try:
        read = msgspec.convert(sample, _Sample)
    except msgspec.ValidationError as error:
        raise BadAnswer(f"a row of a trajectory: {error}") from None
    before = len(read.tokens) - read.response_length
    if before < 1 or not read.response_length == len(read.loss_mask) == len(read.rollout_log_probs):
        raise BadAnswer("a row of a trajectory has lists of different lengths")
    mask = np.concatenate([np.zeros(before, np.bool_), np.asarray(read.loss_mask, np.bool_)])
    logprobs = np.concatenate([np.zeros(before, np.float32), np.asarray(read.rollout_log_probs, np.float32)])
    return Row(np.asarray(read.tokens, np.int64), mask, np.where(mask, logprobs, np.float32(0)))
