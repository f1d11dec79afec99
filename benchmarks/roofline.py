"""Estimates how long a GPU computes for a training step: a bound for each operation that the backend starts.

Usage: python -m benchmarks.roofline [--models 0.6b 8b] [--rows ROW ...] [--card H100] [--micro-batch TOKENS]
                                     [--host-us MICROSECONDS] [--beside FILE] [--out FILE]

An operation takes at least max(FLOP / peak, bytes / bandwidth) of the card (`operation_costs`, `cards`). The step runs
on torch's meta device, so its shapes are those of the whole model (`on_meta`); two and four layers tell what a layer
adds. Kernels take longer: `MEASURED` has the one run on an H100, `BOUND` the estimate of it, and the column "as on the
H100" multiplies products and all else by the factors that were found so; a part takes at least the time of as many
small kernels. The host starts operations while the GPU computes, so a step takes the longer of both.

Each row is estimated for `BUILDS`: this build, with each switch for GPUs alone, and with all; and for rows of one
tenant the loop over PEFT. Of graphs (`graphs_on_meta`) the host starts one operation each.

Parts: `products` with the base model's weights, `adapters`: low-rank products, `attention`: its kernels, `between`:
all else that a layer starts, `logits`: all that is as wide as the vocabulary, `rest`: of a micro-batch outside its
layers, `optimizer`. `--beside`: the result of another build, to show beside this one's.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM
from transformers.utils import logging

from benchmarks import machine, program
from benchmarks.cards import CARDS, Card
from benchmarks.graphs_on_meta import MetaRecorder, graphs_on_meta
from benchmarks.on_meta import SHAPES, as_on_meta, make_config
from benchmarks.operation_costs import ATTENTION, Call
from benchmarks.operation_counts import Operations, in_phase
from benchmarks.peft_on_meta import PeftOnMeta, peft_on_meta
from benchmarks.table import aligned, number
from benchmarks.trainer_flops import model_flops
from benchmarks.trainer_rows import FULL, OF_GPU, BatchRow, tokens_of
from benchmarks.trainer_ways import SkyrlWay, Way
from skyrl.trainer.kernels import logprobs
from skyrl.trainer.kernels.between import IN_TORCH, Between
from skyrl.trainer.model.packed_model import PackedModel
from skyrl.trainer.ranks import sharded_model
from skyrl.trainer.ranks.lora_backend import LoraBackend

ROWS = {row.name: row for row in (*FULL, *OF_GPU)}
DEFAULT_ROWS = ("uniform-32x256", "uniform-8x2048", "grpo-4x16", "tenants-8")
PARTS = ("products", "adapters", "attention", "between", "logits", "rest", "optimizer")
MICRO_BATCH = {"0.6b": 8192, "8b": 4096}
"""Tokens of a micro-batch: what 80 GB hold beside the model without layers that are computed again."""
LOW_RANK = 128
"""A product with a side of at most so many numbers is an adapter's: micro-batches have more rows."""
Numbers = npt.NDArray[np.float64]
"""Operations, FLOP, bytes, seconds, of these seconds those of torch's products and of products of own kernels; and how
many operations the host starts, fewer than there are in graphs."""
BUILDS: dict[str, dict[str, Any]] = {
    "now": {},
    "kernels": {"trainer.kernels": "triton"},
    "varlen": {"trainer.attention": "varlen"},
    "graphs": {"trainer.cuda_graphs": True},
    "all": {"trainer.kernels": "triton", "trainer.attention": "varlen", "trainer.cuda_graphs": True},
    "peft": {},
}
"""By name their switches. The last one is the loop over PEFT, for rows of one tenant."""


class Work(Operations):
    """Inside, sums what the operations of the meta device cost, by part."""

    def __init__(self, card: Card, vocabulary: int) -> None:
        super().__init__()
        self._card, self._vocabulary = card, vocabulary
        self.micro_batches = 0
        self.parts: dict[str, Numbers] = {part: np.zeros(7) for part in PARTS}

    def started(
        self, name: str, phase: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], made: Any
    ) -> None:
        call = Call(name, func, args, kwargs, made)
        places = {tensor.is_meta for tensor in call.tensors if tensor.ndim}
        if True not in places or (len(places) > 1 and name in ("_to_copy", "copy_")):
            return  # work of the host, or a copy between host and device
        super().started(name, phase, func, args, kwargs, made)
        flop, moved = call.flop(), call.moved()
        seconds = self._card.seconds(flop, moved, call.dtype)
        of_products = seconds if flop and name not in ATTENTION else 0.0
        by_whom = (0.0, of_products) if func is None else (of_products, 0.0)
        self.parts[self._part(call, phase, flop)] += (1, flop, moved, seconds, *by_whom, 1)

    def measured(self, function: Callable[[], None]) -> dict[str, Numbers]:
        """What calling a function starts, which is not counted."""
        before, self.parts = self.parts, {part: np.zeros(7) for part in PARTS}
        try:
            with self.phase("measured"), self:
                function()
            return self.parts
        finally:
            self.parts = before

    def replayed(self, costs: Mapping[str, Numbers]) -> None:
        """A graph that computes what has cost so much: the host starts one operation."""
        if not self.is_counting:
            return
        for part, numbers in costs.items():
            self.parts[part][:-1] += numbers[:-1]
        self.parts["between"][-1] += 1

    def in_micro_batches(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The forward of a micro-batch, counted."""

        @functools.wraps(forward)
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.micro_batches += 1
            return forward(*args, **kwargs)

        return counted

    def _part(self, call: Call, phase: str, flop: int) -> str:
        if phase == "optimizer":
            return "optimizer"
        if call.name in ATTENTION:
            return "attention"
        wide = (size for tensor in call.tensors for size in tensor.shape)
        if call.name != "embedding" and any(size and size % self._vocabulary == 0 for size in wide):
            return "logits"
        sizes = call.sizes()
        if not flop or sizes is None or min(sizes) == 1:
            return "between"
        return "adapters" if min(sizes) <= LOW_RANK else "products"


@dataclass(frozen=True)
class Estimate:
    """Of a step: `layer`, of one layer in all micro-batches by part, and `step`, of all layers and the rest. `flops`:
    of the model for all tokens, the numerator of the MFU."""

    model: str
    batch: str
    tokens: int
    micro_batch: int
    micro_batches: int
    flops: float
    layer: dict[str, Numbers]
    step: dict[str, Numbers]

    def total(self) -> Numbers:
        return _total(self.step)

    def seconds(self, factors: Factors) -> dict[str, float]:
        """Of each part."""
        return {part: factors.seconds(numbers) for part, numbers in self.step.items()}

    def mfu(self, card: Card, seconds: float) -> float:
        return self.flops / seconds / card.peak(torch.bfloat16)


@dataclass(frozen=True)
class Factors:
    """How many times its bound a kernel takes, of torch's matrix products, of all else, and of products of own kernels;
    and its least seconds."""

    products: float = 1.0
    others: float = 1.0
    own: float = 1.0
    least: float = 0.0

    def seconds(self, numbers: Numbers) -> float:
        operations, _, _, seconds, of_products, of_own, _ = numbers
        bound = self.products * of_products + self.own * of_own + self.others * (seconds - of_products - of_own)
        return float(max(bound, self.least * operations))


def _total(parts: Mapping[str, Numbers]) -> Numbers:
    return np.sum([*parts.values()], axis=0)


@contextmanager
def counting(work: Work) -> Iterator[None]:
    with ExitStack() as stack:
        for owner, name in ((LoraBackend, "optim_step"), (torch.optim.AdamW, "step")):
            stack.enter_context(in_phase(work, "optimizer", owner, name))
        for owner in (PackedModel, Qwen3ForCausalLM):
            stack.enter_context(patch.object(owner, "forward", work.in_micro_batches(owner.forward)))
        with work.phase("pass"), work:
            yield


def in_kernels(work: Work) -> Between:
    """Each function between the products as one kernel that reads its arguments and writes its results. So are those of
    `kernels.logprobs`."""
    names = [field.name for field in fields(Between)]
    return Between(**{name: work.as_one(name, getattr(IN_TORCH, name)) for name in names})


def _norms_of(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Shapes of `logprobs.norms_of`."""
    return logits.new_empty(len(logits), dtype=torch.float32), logits.new_empty(len(logits), dtype=torch.float32)


def work_of(path: str, row: BatchRow, micro_batch: int, card: Card, build: str = "now") -> Work:
    """What one step of a row costs with the model of this config.json. build: one of `BUILDS`."""
    vocabulary = json.loads((Path(path) / "config.json").read_text())["vocab_size"]
    settings = {"trainer.micro_batch_tokens": micro_batch, "trainer.gradient_checkpointing": False, **BUILDS[build]}
    passes = row.passes(vocabulary)
    work = Work(card, vocabulary)
    with ExitStack() as stack:
        stack.enter_context(as_on_meta())
        if "trainer.kernels" in settings:
            stack.enter_context(patch.object(sharded_model, "between_for", lambda kernels, device: in_kernels(work)))
            for name, function in (("norms_of", _norms_of), ("into_gradient", lambda logits, *_: logits)):
                stack.enter_context(patch.object(logprobs, name, work.as_one(name, function)))
        if "trainer.cuda_graphs" in settings:
            stack.enter_context(graphs_on_meta(MetaRecorder(work.measured, work.replayed)))
        if build == "peft":
            stack.enter_context(peft_on_meta())
        made = SkyrlWay(path, 1, merge=row.merges, config=settings) if build != "peft" else PeftOnMeta(path)
        way: Way = made
        try:
            way.start(passes)
            for _ in range(3):  # later steps have moments, and graphs of all sizes
                way.step()
            with counting(work):
                way.step()
        finally:
            way.close()
    return work


def estimate(model: str, row: BatchRow, micro_batch: int, card: Card, build: str = "now") -> Estimate:
    """model: one of `SHAPES`. build: one of `BUILDS`."""
    with TemporaryDirectory(prefix="skyrl-roofline-") as directory:
        whole = make_config(Path(directory) / "whole", model)
        two, four = (
            work_of(make_config(Path(directory) / str(layers), model, layers), row, micro_batch, card, build)
            for layers in (2, 4)
        )
        passes = row.passes(json.loads((Path(whole) / "config.json").read_text())["vocab_size"])
        flops = model_flops(whole, passes)
    layers = SHAPES[model]["num_hidden_layers"]
    layer = {part: (four.parts[part] - two.parts[part]) / 2 for part in PARTS}
    rest = {part: two.parts[part] - 2 * layer[part] for part in PARTS}
    step = {part: layers * layer[part] + rest[part] for part in PARTS}
    step["between"], step["rest"] = layers * layer["between"], rest["between"] + rest["rest"]
    return Estimate(model, row.name, tokens_of(passes), micro_batch, four.micro_batches, flops, layer, step)


MEASURED = {"products": 0.049, "all": 0.237, "short": 0.018, "host": 0.350, "peft": 8192 / 6180}
"""Seconds of an H100 for a pass of the 0.6 B model with rank 32 (docs/gpu.md, 27 November): matrix products and all
kernels of 32 x 256 tokens; all kernels of 128 tokens, and the host's time for them; and a step of 32 x 256 tokens of
PEFT's loop, in which the GPU waits, too."""
BOUND = {
    **{"products": 0.0448, "all": 0.1323, "operations": 13_071, "short": 0.0025, "operations_of_short": 5_799},
    "operations_of_peft": 47_253,
}
"""What this program said of these passes when it was new, and the build nearly that of the run: micro-batches of 4,096
tokens, transformers' own norms, a layer's operations one by one."""
_OTHERS = (MEASURED["all"] - MEASURED["products"]) / (BOUND["all"] - BOUND["products"])
H100 = Factors(
    MEASURED["products"] / BOUND["products"], _OTHERS, _OTHERS, MEASURED["short"] / BOUND["operations_of_short"]
)
"""Own kernels for products have not run: they are taken to be as far from their bounds as all else."""
NEAR = replace(H100, own=H100.products)
"""If they come as near to them as torch's."""
HOST_S = MEASURED["host"] / BOUND["operations_of_short"]
PEFT_HOST_S = MEASURED["peft"] / BOUND["operations_of_peft"]
"""The host's seconds for an operation, of the backend's and of PEFT's loop."""


def described(found: Estimate, card: Card, host_s: float) -> dict[str, Any]:
    """The estimate as JSON: seconds, operations, and what follows for the MFU."""
    total = found.total()
    bound, as_measured, near = (sum(found.seconds(each).values()) for each in (Factors(), H100, NEAR))
    host = host_s * total[-1]
    layer = _total(found.layer)
    return {
        "model": found.model,
        "batch": found.batch,
        "tokens": found.tokens,
        "micro_batch": found.micro_batch,
        "micro_batches": found.micro_batches,
        "operations_of_layer": layer[-1] / found.micro_batches,
        "gigabytes_of_layer": layer[2] / found.micro_batches / 1e9,
        "layer": {part: [float(each) for each in numbers] for part, numbers in found.layer.items()},
        "step": {part: [float(each) for each in numbers] for part, numbers in found.step.items()},
        "operations": total[-1],
        "bound_s": bound,
        "as_measured_s": as_measured,
        "own_products_near_s": near,
        "host_s": host,
        "with_host_s": max(as_measured, host),
        "mfu_bound": found.mfu(card, bound),
        "mfu_as_measured": found.mfu(card, as_measured),
        "mfu_with_host": found.mfu(card, max(as_measured, host)),
        "largest": max(PARTS, key=lambda part: found.seconds(H100)[part]),
    }


def said() -> str:
    """The comparison with the run on an H100 in words."""
    others, of_others = (found["all"] - found["products"] for found in (BOUND, MEASURED))
    return (
        f"A pass of 8,192 tokens as on 27 November: {BOUND['operations']:,} operations, products "
        f"{1e3 * BOUND['products']:.0f} ms at least, measured {1e3 * MEASURED['products']:.0f} ({H100.products:.2f} "
        f"times); all else {1e3 * others:.0f} ms at least, measured {1e3 * of_others:.0f} ({H100.others:.2f} times). "
        f"One of 128 tokens: {BOUND['operations_of_short']:,} operations, {1e3 * BOUND['short']:.1f} ms at least, "
        f"measured {1e3 * MEASURED['short']:.0f}: {1e6 * H100.least:.1f} µs for a kernel; the host took "
        f"{1e6 * HOST_S:.0f} µs for an operation, and {1e6 * PEFT_HOST_S:.0f} in PEFT's loop over 32 x 256 tokens."
    )


def compared(found: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Of the builds of each model what part of one tenant's tokens/s eight have, and how many times PEFT's one has."""
    by_name = {(each["model"], each["batch"], each["build"]): each for each in found}
    for (model, batch, build), each in by_name.items():
        times = "as_measured_s", "own_products_near_s", "with_host_s"
        one, peft = by_name.get((model, "uniform-32x256", build)), by_name.get((model, batch, "peft"))
        if batch == "tenants-8" and one is not None:
            parts = [f"{one[time] / each[time]:.2f}" for time in times]
            yield (
                f"{model}, {build}: eight tenants have {parts[0]} of one's tokens/s, {parts[1]} if own products come "
                f"as near to their bounds as torch's, {parts[2]} with the host"
            )
        elif peft is not None and build != "peft":
            alone, _, with_host = (f"{peft[time] / each[time]:.1f}" for time in times)
            yield f"{model}, {batch}, {build}: {alone} times PEFT's tokens/s, {with_host} with the host"


def table(found: Sequence[Mapping[str, Any]]) -> str:
    head = ["model, batch", "operations of a layer", "GB", *(f"{part} ms" for part in PARTS), "bound ms"]
    lines = [[*head, "as on the H100", "host ms", "MFU: bound", "as on the H100", "with the host"]]
    for each in found:
        parts = [number(1e3 * each["step"][part][3]) for part in PARTS]
        times = [number(1e3 * each[name]) for name in ("bound_s", "as_measured_s", "host_s")]
        shares = [f"{each[name]:.0%}" for name in ("mfu_bound", "mfu_as_measured", "mfu_with_host")]
        name = ", ".join([each["model"], each["batch"], *([each["build"]] if "build" in each else [])])
        sizes = [number(each["operations_of_layer"]), number(each["gigabytes_of_layer"])]
        lines.append([name, *sizes, *parts, *times, *shares])
    return aligned(lines)


def main() -> None:
    parser = program.parser("roofline", __doc__, out="roofline.json")
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=[*SHAPES], metavar="MODEL")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=DEFAULT_ROWS, metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--card", choices=CARDS, default="H100")
    parser.add_argument("--micro-batch", type=int, help=f"tokens (default: {MICRO_BATCH})")
    parser.add_argument(
        "--host-us",
        type=float,
        default=1e6 * HOST_S,
        help=f"of an operation (default: {1e6 * HOST_S:.0f}, as measured)",
    )
    parser.add_argument("--beside", type=Path, metavar="FILE", help="the result of another build")
    options = parser.parse_args()
    logging.disable_progress_bar()
    card = CARDS[options.card]
    print(said())
    found: list[dict[str, Any]] = []
    before: dict[str, Any] = {} if options.beside is None else json.loads(options.beside.read_text())
    for model in options.models:
        for name in options.rows:
            of_row = [each for each in before.get("results", ()) if (each["model"], each["batch"]) == (model, name)]
            rows = options.micro_batch or MICRO_BATCH[model]
            for build in BUILDS:
                if build != "peft" or not ROWS[name].merges:
                    each = estimate(model, ROWS[name], rows, card, build)
                    host_s = PEFT_HOST_S if build == "peft" else 1e-6 * options.host_us
                    found.append(described(each, card, host_s) | {"build": build})
            own = [each for each in found if (each["model"], each["batch"]) == (model, name)]
            print(table([*(each | {"build": "before"} for each in of_row), *own]), flush=True)
    print(*compared(found), sep="\n")
    facts = machine.facts() | {"card": options.card}
    check = {"measured_s": MEASURED, "bound": BOUND, **vars(H100), "host_s": HOST_S}
    program.write(options.out, {"facts": facts, "check": check, "results": found, "before": before})


if __name__ == "__main__":
    main()
