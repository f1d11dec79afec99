"""The distribution that targets were sampled from, over which a pass scores them: at a temperature, cut by top-k and
top-p, or cut to the token ids that the sampler recorded.

Three keys of `loss_fn_config`, which every loss takes: `sampling_temperature`, `top_k`, `top_p`. Two inputs of a datum,
with SGLang's names in slime: `top_p_token_ids`, integers [M], and `top_p_token_offsets`, integers [N + 1]. The ids from
offset i to offset i + 1 are those that the target at position i was drawn from. None of them: nothing was recorded, and
the target is scored over the whole vocabulary, at the temperature.

Knows arrays and numbers. Knows no logits and no model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from skyrl.trainer.protocol import Datum, InvalidRequest, TrainingPass

TEMPERATURE, TOP_P, TOP_K = SAMPLING_KEYS = ("sampling_temperature", "top_p", "top_k")
IDS, OFFSETS = KEPT_FIELDS = ("top_p_token_ids", "top_p_token_offsets")
LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE = 0.01, 100.0
"""vLLM samples at 0.01 where a request says less. Greedy samples, at 0, have the plain logprobs."""

_Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class SampledFrom:
    """softmax(logits / temperature), cut to the `top_k` likeliest tokens (0: all), and of these to the likeliest that
    have the probability `top_p` together."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    @staticmethod
    def of(config: Mapping[str, float]) -> SampledFrom:
        """From a pass's `loss_fn_config`. Raises InvalidRequest, naming the key."""
        temperature, top_p, top_k = config.get(TEMPERATURE, 1.0), config.get(TOP_P, 1.0), config.get(TOP_K, 0)
        if not _is_number(temperature) or not LOWEST_TEMPERATURE <= temperature <= HIGHEST_TEMPERATURE:
            raise InvalidRequest(
                f"loss_fn_config.{TEMPERATURE}: must be from {LOWEST_TEMPERATURE:g} to {HIGHEST_TEMPERATURE:g}, got "
                f"{temperature!r}; leave it out for greedy samples, whose logprobs are those at 1"
            )
        if not _is_number(top_p) or not 0 < top_p <= 1:
            raise InvalidRequest(f"loss_fn_config.{TOP_P}: must be above 0 and at most 1 (off), got {top_p!r}")
        if not _is_number(top_k) or top_k != int(top_k) or not -1 <= top_k < 2**31:
            raise InvalidRequest(
                f"loss_fn_config.{TOP_K}: must be a whole number from 1, or -1 or 0 (off); got {top_k!r}"
            )
        return SampledFrom(float(temperature), max(int(top_k), 0), float(top_p))

    @property
    def cuts(self) -> bool:
        return self.top_k > 0 or self.top_p < 1


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def check_kept_tokens(datum: Datum, sampled_from: SampledFrom, vocab_size: int) -> None:
    """Raise InvalidRequest unless the datum's recorded tokens, if it has any, fit its tokens and the vocabulary."""
    present = [name for name in KEPT_FIELDS if name in datum.loss_inputs]
    if not present:
        return
    if len(present) == 1:
        missing = OFFSETS if present == [IDS] else IDS
        raise InvalidRequest(f"loss_fn_inputs.{missing}: missing; {present[0]} needs it")
    if sampled_from.cuts:
        raise InvalidRequest(
            f"loss_fn_inputs.{IDS}: cannot be combined with {TOP_P} or {TOP_K} in loss_fn_config: the recorded tokens "
            f"are what these have left; keep {TEMPERATURE} alone"
        )
    ids, offsets = (datum.loss_inputs[name] for name in KEPT_FIELDS)
    for name, array in ((IDS, ids), (OFFSETS, offsets)):
        if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
            raise InvalidRequest(
                f"loss_fn_inputs.{name}: must be int64 in one dimension, got {array.dtype} {list(array.shape)}"
            )
    count = len(datum.tokens)
    if len(offsets) != count + 1 or offsets[0] != 0 or offsets[-1] != len(ids) or (np.diff(offsets) < 0).any():
        raise InvalidRequest(
            f"loss_fn_inputs.{OFFSETS}: must be {count + 1} numbers, one more than model_input has tokens, that do not "
            f"fall, from 0 to {len(ids)}, the number of {IDS}"
        )
    wrong = ids[(ids < 0) | (ids >= vocab_size)]
    if wrong.size:
        raise InvalidRequest(f"loss_fn_inputs.{IDS}: token id {wrong[0]} is outside [0, {vocab_size})")


def restricts(training_pass: TrainingPass) -> bool:
    """Whether a checked pass scores targets in another way than at temperature 1 over the whole vocabulary."""
    if SampledFrom.of(training_pass.loss_config) != SampledFrom():
        return True
    return any(IDS in datum.loss_inputs for datum in training_pass.data)


@dataclass(frozen=True)
class Scorings:
    """The different ways in which the targets of some sequences are scored. of_positions: for each sequence int64 [N],
    the number of the way. kept: of each way the recorded ids, int64; empty: none."""

    of_positions: list[_Ints]
    sampled_from: list[SampledFrom]
    kept: list[_Ints]

    @staticmethod
    def of(sequences: Iterable[tuple[SampledFrom, Datum]]) -> Scorings:
        """`sequences`: checked."""
        numbers: dict[tuple[SampledFrom, bytes], int] = {}
        of_positions: list[_Ints] = []
        for sampled_from, datum in sequences:
            if IDS not in datum.loss_inputs:
                number = numbers.setdefault((sampled_from, b""), len(numbers))
                of_positions.append(np.full(len(datum.tokens), number))
                continue
            ids, offsets = (datum.loss_inputs[name].astype(np.int64) for name in KEPT_FIELDS)
            sets = (ids[start:stop] for start, stop in zip(offsets[:-1], offsets[1:], strict=True))
            keys = ((sampled_from, np.unique(each).tobytes()) for each in sets)
            of_positions.append(np.array([numbers.setdefault(key, len(numbers)) for key in keys]))
        return Scorings(
            of_positions,
            [sampled_from for sampled_from, _ in numbers],
            [np.frombuffer(kept, np.int64) for _, kept in numbers],
        )

    @property
    def count(self) -> int:
        return len(self.kept)
