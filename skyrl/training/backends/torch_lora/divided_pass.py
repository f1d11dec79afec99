"""One long sequence of a pass over all ranks: each runs its rows through the whole model, and all compute the loss.

Log-probabilities are one number for each target: the ranks gather them, and compute the same loss on all of them. Knows
passes and packed rows. Knows nothing of how keys, values or states travel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from skyrl.training.backends.base import Datum
from skyrl.training.backends.torch_lora.collectives import gathered
from skyrl.training.backends.torch_lora.logprobs import Targets
from skyrl.training.backends.torch_lora.lora import LoraSegment
from skyrl.training.backends.torch_lora.loss_inputs import LossGroup, losses_of, trained_entries
from skyrl.training.backends.torch_lora.metrics import Tally
from skyrl.training.backends.torch_lora.model import BaseModel
from skyrl.training.backends.torch_lora.packing import PackedSlice, pack
from skyrl.training.backends.torch_lora.passes import MicroBatch
from skyrl.training.backends.torch_lora.prefixes import Layout
from skyrl.training.backends.torch_lora.rank_base import PieceResult, ScoredPiece, results_of
from skyrl.training.backends.torch_lora.routed_experts import FIELD
from skyrl.training.backends.torch_lora.running import Slice
from skyrl.training.backends.torch_lora.segments import Segment
from skyrl.training.backends.torch_lora.sequence_part import SequencePart
from skyrl.training.backends.torch_lora.sharding import reshard

Score = Callable[[Tensor, LossGroup], ScoredPiece]
"""`RankBase._scored`"""
Gradients = Callable[[Sequence[Tensor], Sequence[LoraSegment], Sequence[Tensor]], list[Tensor]]
"""`Rank._gradients`"""


def run_divided(
    base: BaseModel, piece: Slice, part: SequencePart, score: Score, gradients: Gradients, *, backward: bool
) -> PieceResult:
    """Run this rank's part of a piece that is one sequence. All ranks call this together, each with its own part.

    The result has the logprobs of the whole sequence. The sums of its loss are rank 0's, and empty on the others."""
    made = _micro_batch(piece, part, base.device, backward=backward)
    packed = base.packed
    (datum,) = piece.data
    width = datum.loss_inputs["target_tokens"].size // len(datum.tokens)
    with torch.set_grad_enabled(backward), packed.active.use(made.segments):
        with packed.embeddings_in_graph() as embeddings:
            (own,) = packed(made.packed, made.targets, made.segments)
        sizes = [part.rows_of(rank) * width for rank in range(part.ranks)]
        logprobs = gathered(own.detach(), sizes).requires_grad_(backward)
        scored = score(logprobs, made.losses.groups[0])
        if backward:
            (of_logprobs,) = torch.autograd.grad(scored.total, logprobs)
            total = (own * of_logprobs[part.start * width : part.stop * width]).sum()
            (gradient,) = gradients([total], made.segments, embeddings)
            running = piece.running
            running.gradient = gradient if running.gradient is None else running.gradient.add_(gradient)
    reshard(packed)
    (result,) = results_of([scored], [logprobs], [piece])
    return result if part.rank == 0 else replace(result, tally=Tally())


def _micro_batch(piece: Slice, part: SequencePart, device: torch.device, *, backward: bool) -> MicroBatch:
    """The part's rows; the losses are of the whole sequence."""
    (datum,), (of_pass,) = piece.data, piece.parts
    packed = packed_part(datum, part, device)
    target_tokens = datum.loss_inputs["target_tokens"]
    width = target_tokens.size // len(datum.tokens)
    trained = trained_entries(of_pass)[part.start * width : part.stop * width].copy()
    if not trained.any():  # as `trained_entries`
        trained[0] = True
    targets = Targets.of([target_tokens[part.start : part.stop]], packed.layout.rows_of, trained, device)
    adapter = piece.running.adapter
    segment = LoraSegment(0, packed.stop, adapter.scale, adapter.leaves(backward))
    return MicroBatch([packed], [targets], [segment], losses=losses_of([piece], device, joined=False))


def packed_part(datum: Datum, part: SequencePart, device: torch.device) -> PackedSlice:
    """The part's rows of a sequence without pictures."""
    rows = slice(part.start, part.stop)
    inputs = {FIELD: datum.loss_inputs[FIELD][rows]} if FIELD in datum.loss_inputs else {}
    count = part.stop - part.start
    layout = Layout((Segment(0, count, parent=-1, start=0),), (np.arange(count),))
    packed = pack([Datum(datum.tokens[rows], inputs)], layout, 0, device)
    return replace(packed, positions=packed.positions + part.start, part=part)
