"""Micro-batches that are no whole slices: a rank's part of a long sequence, and one token for a rank without work.

Knows which inputs have a row of their own for each token. Knows nothing of formulas, of the model or of other ranks.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from skyrl.trainer.lora.linear import LoraSegment
from skyrl.trainer.model.logprobs import Targets
from skyrl.trainer.passes.micro_batch import MicroBatch, losses_of, trained_entries
from skyrl.trainer.passes.outputs import value_rows_of
from skyrl.trainer.passes.pass_run import MicroBatchItem, scorings_of
from skyrl.trainer.protocol import Datum
from skyrl.trainer.rows.packing import PackedItem, pack, pack_alone
from skyrl.trainer.rows.prefixes import Layout, RowRange
from skyrl.trainer.rows.routed_experts import FIELD
from skyrl.trainer.shares import SequencePart


def one_token(device: torch.device) -> MicroBatch:
    """A micro-batch for a rank that has nothing to do while others have."""
    token = np.zeros(1, np.int64)
    packed = pack_alone([Datum(token, {})], device)
    targets = Targets.of([token], packed.layout.rows_of, np.ones(1, np.bool_), device)
    return MicroBatch([packed], [targets], [LoraSegment(0, 1, 1.0)])


def part_of(item: MicroBatchItem, part: SequencePart, device: torch.device, *, backward: bool) -> MicroBatch:
    """The part's rows of an adapter's sequence; the losses are of the whole sequence."""
    (datum,), (of_pass,) = item.data, item.parts
    packed = packed_part(datum, part, device)
    target_tokens = datum.loss_inputs["target_tokens"]
    width = target_tokens.size // len(datum.tokens)
    trained = trained_entries(of_pass)[part.start * width : part.stop * width].copy()
    if not trained.any():  # as `trained_entries`
        trained[0] = True
    if (scorings := scorings_of([item])) is not None:
        scorings = replace(scorings, of_positions=[scorings.of_positions[0][part.start : part.stop]])
    targets = Targets.of([target_tokens[part.start : part.stop]], packed.layout.rows_of, trained, device, scorings)
    adapter = item.running.model
    leaves, rows = adapter.leaves(backward), value_rows_of(adapter, packed)
    segment = LoraSegment.of(0, packed.stop, adapter, leaves, rows)
    return MicroBatch([packed], [targets], [segment], losses=losses_of([item], device, joined=False))


def packed_part(datum: Datum, part: SequencePart, device: torch.device) -> PackedItem:
    """The part's rows of a sequence without pictures."""
    rows = slice(part.start, part.stop)
    inputs = {FIELD: datum.loss_inputs[FIELD][rows]} if FIELD in datum.loss_inputs else {}
    count = part.stop - part.start
    layout = Layout((RowRange(0, count, parent=-1, start=0),), (np.arange(count),))
    packed = pack([Datum(datum.tokens[rows], inputs)], layout, 0, device)
    return replace(packed, positions=packed.positions + part.start, part=part)
