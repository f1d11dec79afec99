"""Log-probabilities of target tokens from final hidden states, in chunks of rows to bound the memory.

Knows the output layer. Knows nothing of losses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from skyrl.backends.torch_lora.lora import LoraSegment
from skyrl.backends.torch_lora.output_layer import OutputLayer

LOGITS_BYTES = 128 * 2**20
"""Size of one chunk of float32 logits. Backward needs the memory of about three chunks."""


@dataclass(frozen=True)
class Targets:
    """Targets of one slice, padded to the widest row. ids: int64 [rows, K]. entries: int64 [M], the places of the M
    real entries in the flattened ids; None when all entries are real."""

    ids: Tensor
    entries: Tensor | None

    @staticmethod
    def of(arrays: Sequence[npt.NDArray[Any]], device: torch.device) -> Targets:
        """From int64 target_tokens arrays [N] or [N, K] of consecutive sequences."""
        wide = [array.reshape(len(array), -1) for array in arrays]
        width = max(array.shape[1] for array in wide)
        if all(array.shape[1] == width for array in wide):
            return Targets(torch.from_numpy(np.concatenate(wide)).to(device), None)
        ids = np.concatenate([np.pad(array, ((0, 0), (0, width - array.shape[1]))) for array in wide])
        real = np.concatenate([np.full((len(a), width), np.arange(width) < a.shape[1]) for a in wide])
        return Targets(torch.from_numpy(ids).to(device), torch.from_numpy(np.flatnonzero(real)).to(device))


def target_logprobs(hidden: Tensor, targets: Targets, lm_head: OutputLayer, segment: LoraSegment) -> Tensor:
    """log softmax(lm_head(hidden)) at the targets, temperature 1. hidden: [rows, hidden]; returns float32 [M].

    With gradients and more than one chunk, each chunk's logits are computed again in backward.
    """

    def logprobs(rows: Tensor, ids: Tensor) -> Tensor:
        logits = lm_head.for_segment(rows, segment).float()
        return logits.gather(1, ids) - logits.logsumexp(1, keepdim=True)

    count = max(1, LOGITS_BYTES // (4 * lm_head.base.out_features))
    if len(hidden) <= count:
        chosen = logprobs(hidden, targets.ids)
    else:
        chunks = zip(hidden.split(count), targets.ids.split(count), strict=True)
        if torch.is_grad_enabled():
            parts = [checkpoint(logprobs, rows, ids, use_reentrant=False) for rows, ids in chunks]
        else:
            parts = [logprobs(rows, ids) for rows, ids in chunks]
        chosen = torch.cat(parts)
    flat = chosen.reshape(-1)
    return flat if targets.entries is None else flat.index_select(0, targets.entries)
