"""Counts the operations that a micro-batch and an optimizer step start on a GPU, for a PEFT loop and for the backend.

Usage: python -m benchmarks.operations [--rows ROW ...] [--most NUMBER] [--beside FILE] [--out FILE]

On a GPU each operation costs the host 5 to 100 microseconds, and a GPU that is quicker waits (docs/gpu.md). The counts
need no GPU: a small model with Qwen3's structure runs on the CPU, in bfloat16 with CUDA's branches (`operation_counts`
says what is counted). Shapes do not change the counts; numbers of layers, sequences' lengths that differ, and tenants
do. The part of a layer is half the difference between a model of four and one of two layers; the rest is the part of a
micro-batch. The PEFT loop trains one tenant at a time, so its counts are those of one tenant.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
from transformers.utils import logging

from benchmarks import machine, program, trainer_ways
from benchmarks.cuda_norms import norms_as_on_cuda
from benchmarks.models import make_small
from benchmarks.operation_counts import Operations, in_phase
from benchmarks.table import aligned, number
from benchmarks.trainer_rows import MIXED_RANKS, RANK, BatchRow, Shape
from benchmarks.trainer_ways import PeftWay, SkyrlWay
from skyrl.trainer import device
from skyrl.trainer.attention import packed_attention
from skyrl.trainer.kernels.fused_norms import WITH_FUSED_NORMS
from skyrl.trainer.model import base_model, packed_model
from skyrl.trainer.ranks import lora_backend, lora_rank, sharded_model

_UNIFORM = Shape(1, 4, (0, 0), (32, 32))
_GRPO = Shape(2, 8, (64, 64), (12, 24))
ROWS = (
    BatchRow("uniform", "4 × 32", _UNIFORM),
    BatchRow("uniform-8", "8 tenants, each 1 × 32", replace(_UNIFORM, samples=1), (RANK,) * 8),
    BatchRow("uniform-ranks", "the same with ranks of 4 to 32", replace(_UNIFORM, samples=1), MIXED_RANKS * 2),
    BatchRow("grpo", "2 groups × 8, prompt 64, answers 12–24", _GRPO),
    BatchRow("grpo-8", "8 tenants, each 1 group × 8", replace(_GRPO, groups=1), (RANK,) * 8),
)
WAYS = ("peft", "skyrl")
PHASES = ("forward", "backward", "bookkeeping", "optimizer")
"""`bookkeeping`: masks, tensors of indices, losses, metrics, and the sum of gradients."""
COUNTED = (*PHASES, "uploads", "waits")


@contextmanager
def as_on_cuda() -> Iterator[None]:
    """Inside, this process computes on the CPU with CUDA's dtypes, and takes CUDA's branches."""
    with ExitStack() as stack:
        for module in (base_model, lora_rank, sharded_model, trainer_ways):
            stack.enter_context(patch.object(module, "base_dtype", lambda device: torch.bfloat16))
        stack.enter_context(patch.object(lora_backend, "SHARED_ROWS_ON_CPU", trainer_ways.BUDGET))
        stack.enter_context(patch.object(packed_attention, "wants_all_heads", lambda device: True))
        stack.enter_context(patch.object(lora_rank, "groups_adapters", lambda device: True))
        for module in (base_model, sharded_model):
            stack.enter_context(patch.object(module, "fuses_norms", lambda device: True))
        stack.enter_context(patch.object(device, "has_own_memory", lambda each: each is not device.HOST))
        stack.enter_context(norms_as_on_cuda())
        stack.enter_context(patch.object(sharded_model, "between_for", lambda kernels, device: WITH_FUSED_NORMS))
        yield


@contextmanager
def counting() -> Iterator[Operations]:
    """Counts by the phases of a step: those of the backend and those of a PEFT loop."""
    from transformers.models.qwen3 import modeling_qwen3

    operations = Operations()
    phases: list[tuple[str, Any, str]] = [
        ("forward", packed_model.PackedModel, "forward"),
        ("forward", modeling_qwen3.Qwen3ForCausalLM, "forward"),
        ("bookkeeping", packed_attention, "_mask"),
        ("bookkeeping", modeling_qwen3, "create_causal_mask"),
        ("backward", torch.autograd, "grad"),
        ("backward", torch.Tensor, "backward"),
        ("optimizer", lora_backend.LoraBackend, "optim_step"),
        ("optimizer", torch.optim.AdamW, "step"),
    ]
    with ExitStack() as stack:
        for phase, owner, name in phases:
            stack.enter_context(in_phase(operations, phase, owner, name))
        for module in (device, trainer_ways):
            stack.enter_context(patch.object(module, "synchronize", operations.waited))
        stack.enter_context(operations.copies(device.HostCopy))
        with operations.phase("bookkeeping"), operations:
            yield operations


def count(way: str, path: str, row: BatchRow, names: bool = False) -> Counter[str]:
    """The operations of one step of all passes by phase, with `uploads` and `waits`. The optimizer's operations and
    waits are those of one tenant. `names`: as "phase: operation" instead."""
    of_tenants = row.passes(256)
    with as_on_cuda():
        made = SkyrlWay(path, 1, merge=len(of_tenants) > 1) if way == "skyrl" else PeftWay(path, 1, packed=False)
        made.start(of_tenants if way == "skyrl" else of_tenants[:1])
        try:
            made.step()  # later steps have moments, and what the first one measures
            with counting() as operations:
                made.step()
        finally:
            made.close()
    if names:
        return Counter({f"{phase}: {name}": n for phase, of in operations.counts.items() for name, n in of.items()})
    found = Counter(operations.totals())
    if way == "skyrl":
        found["optimizer"] //= len(of_tenants)
        waits = operations.waits["optimizer"]
        found["waits"] -= waits - waits // len(of_tenants)
    return found


@dataclass(frozen=True)
class Counts:
    """Of one way and row. `layer`: of one layer; `rest`: of a micro-batch without its layers, and of the optimizer's
    step of one tenant."""

    row: str
    way: str
    layer: dict[str, float]
    rest: dict[str, float]

    @property
    def of_layer(self) -> float:
        """Operations of one layer, forward and backward."""
        return sum(self.layer[phase] for phase in PHASES)


def counts(paths: Sequence[str], row: BatchRow, way: str) -> Counts:
    """paths: of the same model with two and with four layers."""
    two, four = (count(way, path, row) for path in paths)
    layer = {name: (four[name] - two[name]) / 2 for name in COUNTED}
    return Counts(row.name, way, layer, {name: two[name] - 2 * layer[name] for name in COUNTED})


def names_of_layer(paths: Sequence[str], row: BatchRow, way: str) -> dict[str, float]:
    """How often each operation starts in a layer, as "phase: operation", the most frequent first. paths: as for
    `counts`."""
    two, four = (count(way, path, row, names=True) for path in paths)
    four.subtract(two)
    return {name: number / 2 for name, number in four.most_common() if number}


def table(found: Sequence[Counts]) -> str:
    lines = [["batch, way", *(f"{name} of a layer" for name in PHASES[:3]), "layer", "÷ peft", "rest:", *COUNTED]]
    of_peft = {each.row: each.of_layer for each in found if each.way == "peft"}
    for each in found:
        ratio = each.of_layer / of_peft[each.row] if each.row in of_peft else None
        cells = [*(each.layer[name] for name in PHASES[:3]), each.of_layer, ratio]
        rest = [f"{each.rest[name]:.0f}" for name in COUNTED]
        lines.append([f"{each.row}, {each.way}", *map(number, cells), "", *rest])
    return aligned(lines)


def main() -> None:
    parser = program.parser("operations", __doc__, out="operations.json")
    rows = [row.name for row in ROWS]
    parser.add_argument("--rows", nargs="+", choices=rows, default=rows, metavar="ROW", help=", ".join(rows))
    parser.add_argument("--most", type=int, default=0, help="also show the most frequent operations (default: none)")
    parser.add_argument("--beside", type=Path, metavar="FILE", help="another build's result, to keep beside this one's")
    options = parser.parse_args()
    logging.disable_progress_bar()
    found: list[Counts] = []
    names: list[dict[str, float]] = []
    with TemporaryDirectory(prefix="skyrl-operations-") as directory:
        paths = [make_small(Path(directory) / str(layers), layers) for layers in (2, 4)]
        for row in (row for row in ROWS if row.name in options.rows):
            for way in WAYS:
                found.append(counts(paths, row, way))
                names.append(names_of_layer(paths, row, way))
                if options.most:
                    most = [*names[-1].items()][: options.most]
                    print(row.name, way, *(f"  {name} {times:g}" for name, times in most), sep="\n")
    print(table(found))
    facts = machine.facts()
    results = [vars(each) | {"names_of_layer": own} for each, own in zip(found, names, strict=True)]
    before: dict[str, Any] = {} if options.beside is None else json.loads(options.beside.read_text())
    program.write(options.out, {"facts": facts, "results": results, "before": before})


if __name__ == "__main__":
    main()
