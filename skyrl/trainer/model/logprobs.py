"""Log-probabilities of target tokens from final hidden states, in chunks of rows to bound the memory; and values.

Each row goes through the output layer once, whatever the number of its targets. Rows whose targets no loss has a
gradient at go through it without one. Rows whose targets are scored over a part of the vocabulary, or at a
temperature, go through `restricted`; a row whose targets are scored in several ways goes through the layer once for
each.

Several chunks need two products with the vocabulary where the loss's gradient is known from a chunk's logprobs: the
gradients of the chunk's rows are computed while its logits are there (`_AtOnce`). Else they need three, because the
backward computes the logits again.

Knows the output layer, and what a model does to its logits afterwards: scaling and soft-capping, under the names that
transformers' configurations give to both. Knows nothing of losses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

from skyrl.base.config.pass_memory import LOGITS_BYTES
from skyrl.trainer.device import uploaded
from skyrl.trainer.kernels.between import blocks
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
    segments are active; `base`: the linear layer inside. `name`: of an adapter's pair for it, among those of a segment.
    `chunk_bytes`: of a chunk of float32 logits; None: `LOGITS_BYTES`. `in_kernels`: `kernels.logprobs` reads the logits
    in their own dtype."""

    linear: Callable[[Tensor, LoraSegment], Tensor]
    base: nn.Linear
    transform: LogitTransform
    name: str = ""
    chunk_bytes: int | None = None
    in_kernels: bool = False

    @property
    def rows_of_a_chunk(self) -> int:
        return max(1, (self.chunk_bytes or LOGITS_BYTES) // (4 * self.base.out_features))

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
class Chunk:
    """Some consecutive rows of `RowTargets`. rows: int64 [n], their places in the slice; owners, ids: int64 [p], the
    pairs, with the owners' indices in `rows`. All three are on the device. pairs: which of all pairs these are."""

    rows: Tensor
    owners: Tensor
    ids: Tensor
    pairs: slice
    restriction: Restriction | None

    def of_hidden(self, hidden: Tensor) -> Tensor:
        """The chunk's rows of hidden [rows, hidden], which are hidden itself if they are all."""
        is_all = self.restriction is None and len(self.rows) == len(hidden)
        return hidden if is_all else hidden.index_select(0, self.rows)

    def segment(self, segment: LoraSegment, pair: Sequence[Tensor], name: str) -> LoraSegment:
        """The segment with the ends of its adapters among the chunk's rows, which ascend, and with other matrices for
        the layer `name`, unless there are none."""
        if segment.ends is not None:
            segment = replace(segment, ends=torch.searchsorted(self.rows, segment.ends, out_int32=True))
        if not pair:
            return segment
        lora_a, lora_b = pair
        return replace(segment, pairs={name: (lora_a, lora_b)})


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

    def chunks(self, count: int) -> Iterator[Chunk]:
        """All rows, `count` at a time."""
        for start in range(0, len(self.rows), count):
            stop = min(start + count, len(self.rows))
            pairs = slice(*map(int, np.searchsorted(self.owners, [start, stop])))
            yield Chunk(
                self.rows[start:stop],
                uploaded([self.owners[pairs] - start], self.rows.device)[0],
                self.ids[pairs],
                pairs,
                None if self.restriction is None else self.restriction.of_rows(start, stop),
            )


PairGradients = Callable[[Tensor, slice], Tensor]
"""From the logprobs of consecutive pairs, float32 [p], and which of all pairs these are: the gradient of a loss with
respect to each, [p]. That of a pair depends on its own logprob alone."""

_MOST_UNLIKE = 0.01
"""The sum of all differences between the gradient that chunks were computed with and the loss's, as a part of the sum
of the latter. Rounding leaves 1e-6; a ratio at a clip bound may be clipped in one of them."""


@dataclass(frozen=True)
class Targets:
    """Targets of one slice, or of consecutive slices. `trained`: of the rows where the loss has a gradient; `other`: of
    the rest. entries: int64 [M], for each entry of the sequences' target_tokens its place in the pairs of `trained`
    followed by `other`; `on_host`: the same. outside: float32 [M], 1 where the target is not among the tokens that its
    row keeps, once `target_logprobs` has written it; None: all rows keep all. gradients: of the loss whose gradient the
    backward will get; None: it is known when all logprobs are, or may be changed afterwards. unlike: once the backward
    has run, float64 [1], 1 if it has got another gradient than `gradients` said; nothing if that was not used."""

    trained: RowTargets
    other: RowTargets
    entries: Tensor
    on_host: npt.NDArray[np.int64]
    outside: Tensor | None = None
    gradients: PairGradients | None = None
    unlike: list[Tensor] = field(default_factory=list)

    def of_entries(self, of_pairs: Tensor) -> Tensor:
        """[M], from numbers of the pairs of `trained` followed by `other`."""
        return of_pairs.index_select(0, self.entries)

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
            entries,
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
    return sum(len(of_slice.trained.rows) for of_slice in targets) > lm_head.rows_of_a_chunk


def target_logprobs(
    hidden: Tensor, targets: Targets, lm_head: OutputLayer, segment: LoraSegment, *, recompute: bool
) -> Tensor:
    """log softmax(lm_head(hidden)) at the targets, temperature 1, or as the targets' rows are restricted. hidden:
    [rows, hidden]; returns float32 [M], and writes `targets.outside`.

    With gradients and `recompute`, no chunk's logits are kept for the backward: they are computed again there, or have
    their gradient at once. Without, they are all kept.
    """
    with torch.no_grad():
        other, other_outside = _pair_logprobs(hidden, targets.other, lm_head, segment, recompute=False)
    if recompute and torch.is_grad_enabled() and _is_known_at_once(targets, lm_head):
        matrices = segment.pairs.get(lm_head.name, ())
        return targets.of_entries(torch.cat([_AtOnce.apply(hidden, targets, lm_head, segment, *matrices), other]))
    trained, outside = _pair_logprobs(hidden, targets.trained, lm_head, segment, recompute=recompute)
    if targets.outside is not None:
        targets.outside.copy_(targets.of_entries(torch.cat([*outside, *other_outside])))
    return targets.of_entries(torch.cat([trained, other]))


def _is_known_at_once(targets: Targets, lm_head: OutputLayer) -> bool:
    """Whether a chunk's gradients can be computed with its logprobs, before the backward. Not where the loss needs all
    logprobs, or may change its gradient afterwards; not where targets are restricted, or none is trained; and not where
    the layer's own weight is trained, whose gradients several segments add up."""
    is_frozen = not any(parameter.requires_grad for parameter in lm_head.base.parameters())
    return targets.gradients is not None and targets.outside is None and is_frozen and len(targets.trained.rows) > 0


def values_of(hidden: Tensor, segment: LoraSegment) -> Tensor:
    """What the segment's value head says of each position: w h + b, float32 [positions]. hidden: [rows, hidden]; a row
    that several sequences share is computed once."""
    assert segment.value_rows is not None
    weight, bias = segment.pairs[VALUE_HEAD]
    return (torch.mv(hidden.float(), weight[0]) + bias).index_select(0, segment.value_rows)


def _pair_logprobs(
    hidden: Tensor, targets: RowTargets, lm_head: OutputLayer, segment: LoraSegment, *, recompute: bool
) -> tuple[Tensor, list[Tensor]]:
    """float32 [pairs]; of each chunk with a restriction which pairs are outside of it, bool. Of several chunks the
    gradients of an adapter's pair, or of a stack's, are added in float32."""
    count = lm_head.rows_of_a_chunk
    matrices = segment.pairs.get(lm_head.name, ()) if len(targets.rows) > count else ()
    reused = [Reused(matrix) for matrix in matrices]

    def logprobs(rows: Tensor, chunk: Chunk) -> tuple[Tensor, ...]:
        of_chunk = chunk.segment(segment, [matrix.use() for matrix in reused], lm_head.name)
        return _chunk_logprobs(rows, chunk, lm_head, of_chunk)

    parts = [hidden.new_empty(0, dtype=torch.float32)]
    outside: list[Tensor] = []
    for chunk in targets.chunks(count):
        rows = chunk.of_hidden(hidden)
        if torch.is_grad_enabled() and recompute:
            found = checkpoint(logprobs, rows, chunk, use_reentrant=False, preserve_rng_state=False)
        else:
            found = logprobs(rows, chunk)
        parts.append(found[0])
        outside += found[1:]
    return torch.cat(parts), outside


def _chunk_logprobs(rows: Tensor, chunk: Chunk, lm_head: OutputLayer, segment: LoraSegment) -> tuple[Tensor, ...]:
    """The logprobs of the chunk's pairs, float32; with a restriction also which are outside of it, bool. rows: the
    chunk's, [n, hidden]."""
    logits = lm_head.for_segment(rows, segment)
    if chunk.restriction is not None:
        return RestrictedLogSoftmaxAt.apply(logits.float(), chunk.owners, chunk.ids, chunk.restriction)
    if lm_head.in_kernels:
        return (_log_softmax_in_kernels(logits, chunk.owners, chunk.ids),)
    return (_LogSoftmaxAt.apply(logits.float(), chunk.owners, chunk.ids),)


def _log_softmax_in_kernels(logits: Tensor, owners: Tensor, ids: Tensor) -> Tensor:
    from skyrl.trainer.kernels.logprobs import LogSoftmaxAt  # imports triton, which a CPU's torch lacks

    return LogSoftmaxAt.apply(logits, owners, ids)


class _AtOnce(Function):
    """The logprobs of trained pairs, float32 [pairs], with the gradients of hidden and of the layer's matrices computed
    beside them: each chunk's logits are used for both and freed. Two products with the vocabulary instead of three.

    hidden: [rows, hidden]; matrices: of an adapter's pair for the layer, or of a stack's, or none. Their gradients over
    several chunks are added in float32. The backward gives these gradients, whatever it gets, and writes
    `targets.unlike`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        targets: Targets,
        lm_head: OutputLayer,
        segment: LoraSegment,
        *matrices: Tensor,
    ) -> Tensor:
        of_hidden = torch.zeros_like(hidden) if ctx.needs_input_grad[0] else None
        sums: list[Tensor] = []
        logprobs: list[Tensor] = []
        starts: list[Tensor] = []
        assert targets.gradients is not None
        for chunk in targets.trained.chunks(lm_head.rows_of_a_chunk):
            rows = chunk.of_hidden(hidden).detach().requires_grad_(of_hidden is not None)
            leaves = [matrix.detach().requires_grad_() for matrix in matrices]
            with torch.enable_grad():
                (found,) = _chunk_logprobs(rows, chunk, lm_head, chunk.segment(segment, leaves, lm_head.name))
            logprobs.append(found.detach())
            starts.append(targets.gradients(logprobs[-1], chunk.pairs))
            wanted = leaves if of_hidden is None else [*leaves, rows]
            own = [*torch.autograd.grad(found, wanted, starts[-1])]
            if of_hidden is not None:
                of_hidden.index_add_(0, chunk.rows, own.pop())
            sums = [total.float().add_(each) for total, each in zip(sums, own, strict=True)] if sums else own
        ctx.gradients = of_hidden, [total.to(matrix.dtype) for total, matrix in zip(sums, matrices, strict=True)]
        ctx.used, ctx.unlike = torch.cat(starts), targets.unlike
        return torch.cat(logprobs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        given, used = gradients[0].nan_to_num(), ctx.used.nan_to_num()
        is_unlike = (given - used).abs().sum() > _MOST_UNLIKE * given.abs().sum()
        ctx.unlike.append(is_unlike.double().view(1))
        of_hidden, of_matrices = ctx.gradients
        del ctx.gradients
        return of_hidden, None, None, None, *of_matrices


class _LogSoftmaxAt(Function):
    """log softmax(logits)[owners, ids], without a copy of the logits: forward makes their exponentials in their place,
    and backward their gradient. The norms have the bits of `torch.logsumexp`, which makes a copy.

    logits: float32 [rows, vocabulary], which nothing else reads; owners, ids: int64 [pairs], no pair twice. With
    p = softmax(logits) and the outputs' gradient g, the logits' gradient is -p_ij (sum of g over row i's pairs), plus g
    at the pairs.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, owners: Tensor, ids: Tensor) -> Tensor:
        of_pairs = logits[owners, ids]
        largest, sums = logits.new_empty(2, len(logits)).unbind()
        for own, own_largest, own_sums in blocks(logits, largest, sums):
            torch.amax(own, 1, out=own_largest).masked_fill_(own_largest.isinf(), 0)
            torch.sum(own.sub_(own_largest[:, None]).exp_(), 1, out=own_sums)
        ctx.save_for_backward(logits, sums, owners, ids)
        return of_pairs - (sums.log() + largest)[owners]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = gradients
        exponentials, sums, owners, ids = ctx.saved_tensors
        of_row = torch.zeros_like(sums).index_add_(0, owners, gradient)
        result = exponentials.mul_(-(of_row / sums)[:, None])
        result.view(-1).index_add_(0, owners * exponentials.shape[1] + ids, gradient)
        return result, None, None
