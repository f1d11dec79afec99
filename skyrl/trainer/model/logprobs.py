"""Log-probabilities of target tokens from final hidden states, in chunks of rows to bound the memory; and values.

Each row goes through the output layer once, whatever the number of its targets. Rows whose targets no loss has a
gradient at go through it without one. Rows whose targets are scored over a part of the vocabulary, or at a
temperature, go through `restricted`; a row whose targets are scored in several ways goes through the layer once for
each. Knows the output layer, and what a model does to its logits afterwards: scaling and soft-capping, under the names
that transformers' configurations give to both. Knows nothing of losses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from skyrl.base.config.pass_memory import LOGITS_BYTES
from skyrl.trainer.device import uploaded
from skyrl.trainer.lora.adapter import VALUE_HEAD
from skyrl.trainer.lora.linear import LoraSegment
from skyrl.trainer.model.restricted import RestrictedLogSoftmaxAt, Restriction
from skyrl.trainer.reused import Reused
from skyrl.trainer.rows.sampled_from import Scorings

_WIDEST = 200.0
"""Logits of the check lie between minus this and this: every known soft-capping and scaling shows there."""


@dataclass(frozen=True)
class LogitTransform:
    """logits -> cap(scale * logits), where cap(x) is softcap * tanh(x / softcap), or x without a softcap. `divisor`: of
    the hidden states before the output layer. `ids`: so many token ids have logits; None: all of the layer's."""

    scale: float = 1.0
    softcap: float | None = None
    divisor: float = 1.0
    ids: int | None = None

    @staticmethod
    def of(config: Any) -> LogitTransform:
        """As transformers' configuration of a text model says: `logit_scale` (Cohere) multiplies, `logits_scaling`
        (Granite) divides, `final_logit_softcapping` (Gemma) caps; `logits_mup_width_multiplier` (Inkling) divides the
        hidden states, and `unpadded_vocab_size` (Inkling) is the number of token ids."""
        scale = getattr(config, "logit_scale", None)
        divisor = getattr(config, "logits_scaling", None)
        ids = getattr(config, "unpadded_vocab_size", None)
        return LogitTransform(
            scale=(1.0 if scale is None else float(scale)) / (1.0 if divisor is None else float(divisor)),
            softcap=getattr(config, "final_logit_softcapping", None),
            divisor=float(getattr(config, "logits_mup_width_multiplier", None) or 1.0),
            ids=None if ids is None or ids >= config.vocab_size else int(ids),
        )

    def __call__(self, logits: Tensor) -> Tensor:
        if self.ids is not None:
            logits = logits[..., : self.ids].contiguous()
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap


@dataclass(frozen=True)
class OutputLayer:
    """lm_head with the model's transform of logits. `linear`: the layer on rows [n, hidden] of one segment, whichever
    segments are active; `base`: the frozen linear layer inside. `name`: of an adapter's pair for it, among those of a
    segment."""

    linear: Callable[[Tensor, LoraSegment], Tensor]
    base: nn.Linear
    transform: LogitTransform
    name: str = ""

    def for_segment(self, rows: Tensor, segment: LoraSegment) -> Tensor:
        """The logits [n, vocabulary] of rows [n, hidden] of one segment."""
        if self.transform.divisor != 1.0:
            rows = rows / self.transform.divisor
        return self.transform(self.linear(rows, segment))


@contextmanager
def given_logits(head: nn.Module) -> Iterator[list[Tensor]]:
    """Inside, the output layer gives evenly spaced numbers in the place of its logits. The list gets them."""
    given: list[Tensor] = []

    def replace(module: nn.Module, args: object, output: Tensor) -> Tensor:
        spaced = torch.linspace(-_WIDEST, _WIDEST, output.numel(), device=output.device)
        given.append(spaced.to(output.dtype).view(output.shape))
        return given[-1]

    handle = head.register_forward_hook(replace)
    try:
        yield given
    finally:
        handle.remove()


@dataclass(frozen=True)
class RowTargets:
    """Pairs of a row and a target, each pair once, by row.

    rows: int64 [R], ascending places in the slice; owners: int64 [pairs], ascending, for each pair the index of its row
    in `rows`, on the CPU; ids: int64 [pairs]. rows and ids are on the device. `restriction`: how the rows' targets are
    scored; a place is there once for each way. None: over the whole vocabulary at temperature 1."""

    rows: Tensor
    owners: npt.NDArray[np.int64]
    ids: Tensor
    restriction: Restriction | None = None


@dataclass(frozen=True)
class Targets:
    """Targets of one slice, or of consecutive slices. `trained`: of the rows where the loss has a gradient; `other`: of
    the rest. entries: int64 [M], for each entry of the sequences' target_tokens its place in the pairs of `trained`
    followed by `other`. outside: float32 [M], 1 where the target is not among the tokens that its row keeps, once
    `target_logprobs` has written it; None: all rows keep all."""

    trained: RowTargets
    other: RowTargets
    entries: Tensor
    outside: Tensor | None = None

    @staticmethod
    def of(
        arrays: Sequence[npt.NDArray[Any]],
        rows_of: Sequence[npt.NDArray[np.int64]],
        trained: npt.NDArray[np.bool_],
        device: torch.device,
        scorings: Scorings | None = None,
    ) -> Targets:
        """From int64 target_tokens arrays [N] or [N, K] of the sequences, their rows [N], and, for each entry of these
        arrays, whether the loss has a gradient there: bool [M]. `scorings`: of the sequences' targets; None: plain."""
        ids = np.concatenate([array.reshape(-1) for array in arrays])
        rows = np.concatenate([np.repeat(rows, array[0].size) for rows, array in zip(rows_of, arrays, strict=True)])
        ways: _Ways | None = None
        if scorings is not None:
            ways, rows = _Ways.of(scorings, arrays, rows)
        row_is_trained = np.zeros(int(rows.max()) + 1, np.bool_)
        row_is_trained[rows[trained]] = True
        # One number for each pair; the pairs of trained rows come first, each part by row
        key = (np.where(row_is_trained, 0, len(row_is_trained)) + np.arange(len(row_is_trained)))[rows]
        width = int(ids.max()) + 1
        pairs, entries = np.unique(key * width + ids, return_inverse=True)
        pair_rows, pair_ids = np.divmod(pairs, width)
        first_other = int(np.searchsorted(pair_rows, len(row_is_trained)))
        return Targets(
            _row_targets(pair_rows[:first_other], pair_ids[:first_other], device, ways),
            _row_targets(pair_rows[first_other:] - len(row_is_trained), pair_ids[first_other:], device, ways),
            torch.from_numpy(entries).to(device),
            None if ways is None else torch.zeros(len(entries), device=device),
        )


@dataclass(frozen=True)
class _Ways:
    """Rows, each once for each way in which its targets are scored. rows: int64 [V], ascending; numbers: int64 [V], of
    the ways."""

    scorings: Scorings
    rows: npt.NDArray[np.int64]
    numbers: npt.NDArray[np.int64]

    @staticmethod
    def of(
        scorings: Scorings, arrays: Sequence[npt.NDArray[Any]], rows: npt.NDArray[np.int64]
    ) -> tuple[_Ways, npt.NDArray[np.int64]]:
        """Also, for each entry of the arrays, the index [M] of what takes the place of its row in `rows` [M]."""
        numbers = [np.repeat(own, array[0].size) for own, array in zip(scorings.of_positions, arrays, strict=True)]
        found, places = np.unique(rows * scorings.count + np.concatenate(numbers), return_inverse=True)
        return _Ways(scorings, *np.divmod(found, scorings.count)), places


def _row_targets(
    rows: npt.NDArray[np.int64], ids: npt.NDArray[np.int64], device: torch.device, ways: _Ways | None
) -> RowTargets:
    own, owners = np.unique(rows, return_inverse=True)
    restriction: Restriction | None = None
    if ways is not None:
        restriction, own = Restriction.of(ways.scorings, ways.numbers[own]), ways.rows[own]
    return RowTargets(torch.from_numpy(own).to(device), owners, torch.from_numpy(ids).to(device), restriction)


def outside_of(targets: Sequence[Targets]) -> list[Tensor]:
    """After a forward, `Targets.outside` of all targets, float32 [entries]; nothing if all rows keep all tokens."""
    if all(each.outside is None for each in targets):
        return []
    marks = [
        torch.zeros_like(each.entries, dtype=torch.float32) if each.outside is None else each.outside
        for each in targets
    ]
    return [torch.cat(marks)]


def exceed_a_chunk(targets: Sequence[Targets], lm_head: OutputLayer) -> bool:
    """Whether the rows of a micro-batch's slices that have a gradient make more than one chunk together."""
    return sum(len(of_slice.trained.rows) for of_slice in targets) > _rows_of_a_chunk(lm_head)


def target_logprobs(
    hidden: Tensor, targets: Targets, lm_head: OutputLayer, segment: LoraSegment, *, recompute: bool
) -> Tensor:
    """log softmax(lm_head(hidden)) at the targets, temperature 1, or as the targets' rows are restricted. hidden:
    [rows, hidden]; returns float32 [M], and writes `targets.outside`.

    With gradients and `recompute`, each chunk's logits are computed again in backward. Without, they are all kept.
    """
    with torch.no_grad():
        other, other_outside = _pair_logprobs(hidden, targets.other, lm_head, segment, recompute=False)
    trained, outside = _pair_logprobs(hidden, targets.trained, lm_head, segment, recompute=recompute)
    if targets.outside is not None:
        targets.outside.copy_(torch.cat([*outside, *other_outside]).index_select(0, targets.entries))
    return torch.cat([trained, other]).index_select(0, targets.entries)


def values_of(hidden: Tensor, segment: LoraSegment) -> Tensor:
    """What the segment's value head says of each position: w h + b, float32 [positions]. hidden: [rows, hidden]; a row
    that several sequences share is computed once."""
    assert segment.value_rows is not None
    weight, bias = segment.pairs[VALUE_HEAD]
    return (torch.mv(hidden.float(), weight[0]) + bias).index_select(0, segment.value_rows)


def _rows_of_a_chunk(lm_head: OutputLayer) -> int:
    return max(1, LOGITS_BYTES // (4 * lm_head.base.out_features))


def _pair_logprobs(
    hidden: Tensor, targets: RowTargets, lm_head: OutputLayer, segment: LoraSegment, *, recompute: bool
) -> tuple[Tensor, list[Tensor]]:
    """float32 [pairs]; of each chunk with a restriction which pairs are outside of it, bool. Of several chunks the
    gradients of an adapter's pair, or of a stack's, are added in float32."""
    count = _rows_of_a_chunk(lm_head)
    total = len(targets.rows)
    matrices = segment.pairs.get(lm_head.name, ()) if total > count else ()
    reused = [Reused(matrix) for matrix in matrices]

    def logprobs(
        rows: Tensor, owners: Tensor, ids: Tensor, of_chunk: LoraSegment, restriction: Restriction | None
    ) -> tuple[Tensor, ...]:
        if reused:
            lora_a, lora_b = reused
            of_chunk = replace(of_chunk, pairs={lm_head.name: (lora_a.use(), lora_b.use())})
        logits = lm_head.for_segment(rows, of_chunk).float()
        if restriction is None:
            return (_LogSoftmaxAt.apply(logits, owners, ids),)
        return RestrictedLogSoftmaxAt.apply(logits, owners, ids, restriction)

    parts = [hidden.new_empty(0, dtype=torch.float32)]
    outside: list[Tensor] = []
    for start in range(0, total, count):
        stop = min(start + count, total)
        first, last = np.searchsorted(targets.owners, [start, stop])
        (owners,) = uploaded([targets.owners[first:last] - start], hidden.device)
        chosen = targets.rows[start:stop]
        restriction = None if targets.restriction is None else targets.restriction.of_rows(start, stop)
        is_all = restriction is None and len(chosen) == len(hidden)
        rows = hidden if is_all else hidden.index_select(0, chosen)
        arguments = (rows, owners, targets.ids[first:last], _on_rows(segment, chosen), restriction)
        if torch.is_grad_enabled() and recompute:
            found = checkpoint(logprobs, *arguments, use_reentrant=False, preserve_rng_state=False)
        else:
            found = logprobs(*arguments)
        parts.append(found[0])
        outside += found[1:]
    return torch.cat(parts), outside


def _on_rows(segment: LoraSegment, chosen: Tensor) -> LoraSegment:
    """The segment with the ends of its adapters among the `chosen` rows, which ascend."""
    if segment.ends is None:
        return segment
    return replace(segment, ends=torch.searchsorted(chosen, segment.ends, out_int32=True))


class _LogSoftmaxAt(torch.autograd.Function):
    """log softmax(logits)[owners, ids], without a copy of the logits: backward makes their gradient in their place.

    logits: float32 [rows, vocabulary], which nothing else reads; owners, ids: int64 [pairs], no pair twice. With
    p = softmax(logits) and the outputs' gradient g, the logits' gradient is -p_ij (sum of g over row i's pairs), plus g
    at the pairs.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, owners: Tensor, ids: Tensor) -> Tensor:
        norms = logits.logsumexp(1)
        ctx.save_for_backward(logits, norms, owners, ids)
        return logits[owners, ids] - norms[owners]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = gradients
        logits, norms, owners, ids = ctx.saved_tensors
        of_row = torch.zeros_like(norms).index_add_(0, owners, gradient)
        result = logits.sub_(norms[:, None]).exp_().mul_(-of_row[:, None])
        result.view(-1).index_add_(0, owners * logits.shape[1] + ids, gradient)
        return result, None, None
