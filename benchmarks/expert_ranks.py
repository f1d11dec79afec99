"""What a training step of a mixture over ranks sends: `python -m benchmarks.expert_ranks`.

Trains an adapter on a random Qwen3-MoE once with ranks that gather all weights, and once with ranks that hold experts
(`trainer.placement.expert_parallel`), each rank a process on this machine, joined by gloo. Bytes are counted where
torch.distributed is called: what a rank gets from the others. They do not depend on the machine; seconds do.

With --bits the same again with a release of the model in 4 or 8 bits, whose weights are computed at loading, or stay in
these bits (`trainer.keep_quantized`).
"""

from __future__ import annotations

import functools
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from benchmarks import program
from benchmarks.processes import peak_resident_mb
from skyrl.base.types.weights import LoraSpec
from skyrl.trainer.model.row_budget import BudgetSettings
from skyrl.trainer.protocol import AdamParams, Datum, TrainingPass
from skyrl.trainer.ranks.lora_rank import ExpertRank, LoraRank
from skyrl.trainer.ranks.plan import make_plan
from skyrl.trainer.ranks.rank import RankSettings
from skyrl.trainer.tools.quantize import Scheme, quantize
from tests.local_ranks import LocalRanks

VOCAB, LORA_RANK, BUDGET, STEPS = 4096, 8, 4096, 3
GROUP = 64
"""Columns of a row that share a factor."""
MB = 1e6
COLUMNS = (
    "parameters",
    "MB held",
    "numbers of the adapter",
    "MB gathered",
    "MB exchanged",
    "MB",
    "s",
    "CPU s",
    "peak MB",
    "loss",
)
_sent: dict[str, float] = {}
"""Bytes that this rank got from others, by the function of torch.distributed."""


@dataclass(frozen=True)
class Measured:
    """Of one rank: parameters of the base model that it holds, and the MB of these; numbers of the adapter; peak of
    memory in MB; and of a step: MB by function, seconds, CPU seconds, loss of the last step."""

    parameters: int
    held_mb: float
    adapter: int
    peak_mb: float
    mb: dict[str, float]
    wall_s: float
    cpu_s: float
    loss: float


def _count(name: str, got: Callable[[Sequence[Any], int, int], float]) -> None:
    """Count the bytes of a function of torch.distributed. `got`: of its arguments, the rank, and the ranks."""
    function: Any = getattr(dist, name)

    @functools.wraps(function)
    def counted(*arguments: Any, **named: Any) -> Any:
        _sent[name] = _sent.get(name, 0.0) + got([*arguments, *named.values()], dist.get_rank(), dist.get_world_size())
        return function(*arguments, **named)

    setattr(dist, name, counted)


def _gathered(arguments: Sequence[Any], rank: int, ranks: int) -> float:
    """The first argument is the output."""
    return arguments[0].nbytes * (ranks - 1) / ranks


def _exchanged(arguments: Sequence[Any], rank: int, ranks: int) -> float:
    """The third argument says how many rows come from each rank."""
    output = arguments[0]
    if len(arguments) < 3 or not len(output):
        return _gathered(arguments, rank, ranks)
    return output.nbytes * (1 - arguments[2][rank] / len(output))


def _reduced(arguments: Sequence[Any], rank: int, ranks: int) -> float:
    return 2 * arguments[0].nbytes * (ranks - 1) / ranks


def _passes(sequences: int, tokens: int, step: int) -> list[TrainingPass]:
    rng = np.random.default_rng(step)
    texts = rng.integers(0, VOCAB, (sequences, tokens + 1))
    weights = np.ones(tokens, np.float32)
    data = [Datum(text[:-1], {"target_tokens": text[1:], "weights": weights}) for text in texts]
    return [TrainingPass("m", data, "cross_entropy")]


class _Counting(LoraRank):
    """A rank that counts what it gets from others."""

    def steps(self, options: Any) -> Measured:
        """Train STEPS steps. Seconds and CPU seconds are those of the fastest, bytes and loss those of the last one."""
        for name in ("all_gather_single", "all_gather_into_tensor"):
            if hasattr(dist, name):
                _count(name, _gathered)
        _count("all_to_all_single", _exchanged)
        _count("all_reduce", _reduced)
        self.create("m", LoraSpec(rank=LORA_RANK, alpha=32.0, seed=1), self.load().targets)
        walls, cpus, loss = list[float](), list[float](), 0.0
        for step in range(STEPS):
            _sent.clear()
            started, used = time.monotonic(), time.process_time()
            passes = _passes(options.sequences, options.tokens, step)
            plan = make_plan(list(enumerate(passes)), options.ranks, BUDGET, shared_rows=0)
            pieces = self.run(passes, make_plan([], options.ranks, BUDGET, shared_rows=0), plan)
            self.optim_step("m", AdamParams(learning_rate=1e-4))
            walls.append(time.monotonic() - started)
            cpus.append(time.process_time() - used)
            loss = sum(piece.tally.loss for of_pass in pieces.values() for piece in of_pass)
        mb, memory = {name: count / MB for name, count in _sent.items()}, self.memory()
        adapter = sum(len(array) for array in self.export("m", False)[0] if array is not None)
        peak, held = peak_resident_mb(os.getpid()), memory["held"] / MB
        return Measured(memory["parameters"], held, adapter, peak, mb, min(walls), min(cpus), loss)


class _Experts(_Counting, ExpertRank):
    pass


def measure(kind: type[LoraRank], path: str, keep: bool, options: Any) -> list[Measured]:
    """By rank. `keep`: whether the weights of a quantized release stay in its bits."""
    budget = BudgetSettings(BUDGET, full=False, of_samplers=0.0, takes_turns=False)
    settings = RankSettings(path, 1, False, "refuse", True, 300.0, False, budget, keep)
    with closing(LocalRanks(options.ranks, settings, kind)) as group:
        return group.call("steps", options)


def make_model(path: Path, options: Any) -> None:
    """A random mixture in bfloat16."""
    torch.manual_seed(1)
    config = Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=options.hidden,
        moe_intermediate_size=options.width,
        num_hidden_layers=options.layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        num_experts=options.experts,
        num_experts_per_tok=options.per_token,
        norm_topk_prob=True,
        tie_word_embeddings=False,
    )
    config.head_dim = options.hidden // 8
    Qwen3MoeForCausalLM(config).bfloat16().save_pretrained(path)


def main() -> None:
    parser = program.parser("expert_ranks", __doc__)
    for name, default in (
        ("ranks", 2),
        ("layers", 8),
        ("hidden", 512),
        ("width", 384),
        ("experts", 32),
        ("per-token", 4),
        ("sequences", 16),
        ("tokens", 128),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    parser.add_argument("--bits", type=int, choices=(4, 8), help="also a release of the model in so many bits")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        full, release = Path(directory) / "full", Path(directory) / "release"
        make_model(full, options)
        bases = [("", full, False)]
        if options.bits:
            quantize(str(full), release, Scheme(options.bits, GROUP))
            of = f", {options.bits} bits"
            bases += [(f"{of} computed at loading", release, False), (of, release, True)]
        print(f"| ranks | {' | '.join(COLUMNS)} |\n|{'---|' * (len(COLUMNS) + 1)}")
        for name, kind, (base, path, keep) in (
            (name, kind, base) for name, kind in (("gather", _Counting), ("hold experts", _Experts)) for base in bases
        ):
            found = measure(kind, str(path), keep, options)
            gathered = max(sum(mb for function, mb in each.mb.items() if "gather" in function) for each in found)
            exchanged = max(each.mb.get("all_to_all_single", 0.0) for each in found)
            cells = (
                f"{max(each.parameters for each in found):,}",
                f"{max(each.held_mb for each in found):.0f}",
                f"{max(each.adapter for each in found):,}",
                f"{gathered:.1f}",
                f"{exchanged:.1f}",
                f"{max(sum(each.mb.values()) for each in found):.1f}",
                f"{max(each.wall_s for each in found):.1f}",
                f"{sum(each.cpu_s for each in found):.1f}",
                f"{max(each.peak_mb for each in found):,.0f}",
                f"{sum(each.loss for each in found):.6f}",
            )
            print(f"| {options.ranks}, {name}{base} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
