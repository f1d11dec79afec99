"""Log-probabilities over the distribution that a sampler drew from: at a temperature, over the tokens that it kept.

The tokens that top-k and top-p keep are those of vLLM 0.32 (`vllm/v1/sample`): the logits are divided by the
temperature; top-k keeps the k largest and all that equal the k-th; top-p drops the least likely of these whose
probabilities add up to at most 1 - p, in float32, and never the likeliest. Where several logits equal the least one
kept, all are kept; vLLM's sort may drop some of them (of logits in bfloat16 these had 0.2 % of the probability). The
kept tokens are constants of the gradient.

A target that the sampler kept may be outside here, because the two programs compute logits that differ by rounding. It
then counts as kept for its own logprob: the logprob is finite, its gradient is exact, and it is marked as outside.

Knows logits in chunks of rows. Knows nothing of models or losses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from skyrl.trainer.rows.sampled_from import Scorings

_BLOCKS = 4
"""A chunk is sorted in so many blocks of rows: one takes 16 bytes for each of its logits, which have 4."""


@dataclass(frozen=True)
class Restriction:
    """How the targets of R rows are scored, on the CPU. temperature, top_p: float32 [R]; top_k: int64 [R], 0: all. The
    ids that row i keeps are int64 ids[ends[i]:ends[i + 1]]; none: top_k and top_p say."""

    temperature: npt.NDArray[np.float32]
    top_k: npt.NDArray[np.int64]
    top_p: npt.NDArray[np.float32]
    ids: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]

    @staticmethod
    def of(scorings: Scorings, numbers: npt.NDArray[np.int64]) -> Restriction:
        """numbers: int64 [R], of each row its way of scoring."""
        ways = [scorings.sampled_from[number] for number in numbers]
        kept = [scorings.kept[number] for number in numbers]
        return Restriction(
            np.array([way.temperature for way in ways], np.float32),
            np.array([way.top_k for way in ways], np.int64),
            np.array([way.top_p for way in ways], np.float32),
            np.concatenate(kept) if kept else np.zeros(0, np.int64),
            np.cumsum([0, *map(len, kept)]),
        )

    def of_rows(self, start: int, stop: int) -> Restriction:
        first, last = self.ends[start], self.ends[stop]
        return Restriction(
            self.temperature[start:stop],
            self.top_k[start:stop],
            self.top_p[start:stop],
            self.ids[first:last],
            self.ends[start : stop + 1] - first,
        )

    def scale(self, logits: Tensor) -> Tensor:
        """Divide float32 [R, vocabulary] by the temperatures, in place. Returns these, [R, 1]."""
        temperature = torch.from_numpy(self.temperature).to(logits.device)[:, None]
        logits.div_(temperature)
        return temperature

    def cut(self, scaled: Tensor) -> None:
        """Set the logits of tokens that are not kept to minus infinity, in place."""
        if len(self.ids):
            counts = np.diff(self.ends)
            rows, ids = np.repeat(np.arange(len(counts)), counts), self.ids
            flat = torch.from_numpy(rows * scaled.shape[1] + ids).to(scaled.device)
            kept = scaled.view(-1).index_select(0, flat)
            scaled.index_fill_(0, torch.from_numpy(np.flatnonzero(counts)).to(scaled.device), -torch.inf)
            scaled.view(-1).index_copy_(0, flat, kept)
        if ((self.top_k > 0) | (self.top_p < 1)).any():
            block = -(-len(scaled) // _BLOCKS)
            for start in range(0, len(scaled), block):
                rows = slice(start, start + block)
                part = scaled[rows]
                least = least_kept(part, self.top_k[rows], self.top_p[rows])
                part.masked_fill_(part < least[:, None], -torch.inf)


def least_kept(scaled: Tensor, top_k: npt.NDArray[np.int64], top_p: npt.NDArray[np.float32]) -> Tensor:
    """The smallest logit that top-k and then top-p keep, float32 [R]. scaled: float32 [R, vocabulary], divided by the
    temperature; top_k: int64 [R], 0: all; top_p: float32 [R]."""
    vocabulary = scaled.shape[1]
    most = np.where(top_k == 0, vocabulary, np.minimum(top_k, vocabulary))
    largest = int(most.max())
    places = torch.from_numpy(most - 1).to(scaled.device)[:, None]
    # As many values as any row keeps, the largest first: those of a small k need no sort of the vocabulary
    ordered = scaled.topk(largest, dim=1).values if largest < vocabulary else scaled.sort(dim=1, descending=True).values
    of_k = ordered.gather(1, places)
    if (top_p == 1).all():
        return of_k[:, 0]
    if largest < vocabulary and (with_ties := int((scaled >= of_k).sum(1).max())) > largest:
        ordered = scaled.topk(with_ties, dim=1).values
    ascending = ordered.masked_fill(ordered < of_k, -torch.inf).flip(1)
    del ordered
    p = torch.from_numpy(top_p).to(scaled.device)[:, None]
    dropped = (ascending.softmax(1).cumsum_(1) <= 1 - p).sum(1, keepdim=True).clamp_(max=ascending.shape[1] - 1)
    return torch.where(p < 1, ascending.gather(1, dropped), of_k)[:, 0]


class RestrictedLogSoftmaxAt(torch.autograd.Function):
    """The logprobs of targets over what their rows keep, float32 [pairs], and which are outside of that, bool [pairs].
    Takes the place of the logits' memory, as backward does for their gradient.

    logits: float32 [rows, vocabulary], which nothing else reads; owners, ids: int64 [pairs], no pair twice. With
    z = logits / T, S the tokens that row i keeps, and S' = S with the pair's own token t:
    lp = z_t - log sum over S' of exp z. Its gradient with respect to z_j is [j = t] - [j in S'] exp(z_j - log sum).
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, owners: Tensor, ids: Tensor, restriction: Restriction
    ) -> tuple[Tensor, Tensor]:
        temperature = restriction.scale(logits)
        targets = logits[owners, ids]
        restriction.cut(logits)
        outside = logits[owners, ids] < targets
        norms = logits.logsumexp(1)
        of_pairs = norms[owners]
        of_pairs = torch.where(outside, torch.logaddexp(of_pairs, targets), of_pairs)
        logprobs = targets - of_pairs
        ctx.save_for_backward(logits, norms, owners, ids, temperature, of_pairs, logprobs, outside)
        ctx.mark_non_differentiable(outside)
        return logprobs, outside

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        gradient = gradients[0]
        logits, norms, owners, ids, temperature, of_pairs, logprobs, outside = ctx.saved_tensors
        # A target outside takes a share of the sum, so that the kept tokens have less of it
        shares = torch.where(outside, (norms[owners] - of_pairs).exp(), 1)
        of_row = torch.zeros_like(norms).index_add_(0, owners, gradient * shares)
        own = torch.where(outside, 1 - logprobs.exp(), 1)
        result = logits.sub_(norms[:, None]).exp_().mul_(-of_row[:, None])
        result.view(-1).index_add_(0, owners * logits.shape[1] + ids, gradient * own)
        return result.div_(temperature), None, None, None
