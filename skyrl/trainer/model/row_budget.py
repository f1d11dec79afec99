"""How many rows a micro-batch has at most: `trainer.micro_batch_tokens`, or as many as the memory holds.

A GPU waits for the host, which starts as many operations for a small micro-batch as for a large one. So there larger
micro-batches are faster, as long as their activations need not be recomputed. A CPU does not wait: seven layers of
Qwen3-0.6B took 31.9 s of the processor for 16 sequences of 256 tokens in micro-batches of 1,024 rows, and 34.6 s in one
of 4,096. But a group whose rows do not fit computes its prompt again in each part: 64 samples of 8 prompts of 256 to
1,024 tokens, with answers of 32 to 256, have 15,540 rows in micro-batches of 4,096 rows, 19,228 in those of 2,048, and
48,168 in those of 1,024.

The forward of a small micro-batch at the start tells `Recomputation` what a row keeps for its backward. Knows memory,
and what a row keeps. Knows nothing of passes or losses.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from skyrl.base.config.pass_memory import (
    FULL_BYTES,
    LOGITS_CHUNKS,
    ON_CPU,
    ON_CUDA,
    logits_bytes_on_cuda,
    rows_within,
)
from skyrl.base.config.server import ServerConfig
from skyrl.base.types.weights import LoraSpec
from skyrl.runtime.processes.host_resources import limit_bytes
from skyrl.trainer.lora.adapter import Adapter, Target
from skyrl.trainer.lora.linear import LoraSegment
from skyrl.trainer.model.base_model import BaseModel
from skyrl.trainer.model.logprobs import Targets
from skyrl.trainer.model.packed_model import PackedModel
from skyrl.trainer.model.recomputation import Recomputation
from skyrl.trainer.protocol import Datum
from skyrl.trainer.rows.packing import pack_alone

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RowBudget:
    """At most so many `rows` in a micro-batch, and where the number comes from."""

    rows: int
    reason: str

    def __str__(self) -> str:
        return f"{self.rows} rows ({self.reason})"


@dataclass(frozen=True)
class BudgetSettings:
    """`given`: `trainer.micro_batch_tokens`. `full`: all parameters will be trained. `of_samplers`: the share of the
    trainer's GPU that vLLM takes at any time. `takes_turns`: vLLM has given its memory back when the trainer works."""

    given: int | None
    full: bool
    of_samplers: float
    takes_turns: bool

    @staticmethod
    def of(config: ServerConfig) -> BudgetSettings:
        trainer, inference = config.backend_config.trainer, config.backend_config.inference
        takes_turns = not config.modes.forwards
        # As `skyrl.inference.vllm_command.inference_devices` has it: with Ray, and with enough GPUs, vLLM has others
        wanted = inference.num_engines * inference.tensor_parallel_size
        apart = takes_turns or config.ray is not None or torch.cuda.device_count() > wanted
        shared = config.modes.manages_inference and not apart
        return BudgetSettings(
            trainer.micro_batch_tokens,
            trainer.full_finetuning,
            inference.gpu_memory_utilization if shared else 0.0,
            takes_turns,
        )

    def measures_on(self, device: torch.device) -> bool:
        """Whether `measure_row` must run before `of_model`."""
        return self.given is None and device.type == "cuda"

    def chosen(self, budgets: Sequence[RowBudget]) -> int:
        """The smallest of the ranks' budgets, for all of them: they run the same number of micro-batches."""
        smallest = min(budgets, key=lambda each: each.rows)
        logger.info("a micro-batch has at most %s", smallest)
        return smallest.rows

    def of_model(self, packed: PackedModel, numel: int, held: int, *, ranks: int = 1) -> RowBudget:
        """The budget for a loaded model, of which this rank holds `numel` parameters in `held` bytes.

        On CUDA the number follows the memory that is free now. On a CPU where a pass is cut decides the last bits of
        its gradient. So there the number follows only what stays the same after a crash: the model's shape, and the
        limit of the host's or the cgroup's memory, which `ranks` share.
        """
        if self.given is not None:
            return RowBudget(self.given, "trainer.micro_batch_tokens")
        recomputation = packed.recomputation
        assert recomputation is not None
        device, of_row = next(packed.parameters()).device, recomputation.bytes_of_row
        if device.type == "cuda":
            memory = self._beside_model(packed, numel)
            memory, bounds = memory - LOGITS_CHUNKS * logits_bytes_on_cuda(memory), ON_CUDA
            found = f"measured {of_row / 1e6:.2f} MB a row, {memory / 1e9:.1f} GB of the GPU free"
        else:
            memory, bounds = limit_bytes() / ranks - max(held, self._later(numel)), ON_CPU
            found = f"about {of_row / 1e6:.2f} MB a row, {memory / 1e9:.1f} GB of memory beside the model"
        return RowBudget(rows_within(memory, of_row, bounds), found)

    def logits_bytes(self, packed: PackedModel, numel: int) -> int | None:
        """Of a chunk of float32 logits on CUDA, for a loaded model, of which this rank holds `numel` parameters."""
        if next(packed.parameters()).device.type != "cuda":
            return None
        return logits_bytes_on_cuda(self._beside_model(packed, numel))

    def _later(self, numel: int) -> int:
        """Bytes that training takes later for the model's own parameters."""
        return FULL_BYTES * numel if self.full else 0

    def _beside_model(self, packed: PackedModel, numel: int) -> float:
        """Bytes of the GPU that a micro-batch can have, logits and all. vLLM starts beside the trainer, so its share
        may look free now, or be taken though vLLM gives it back later."""
        recomputation, device = packed.recomputation, next(packed.parameters()).device
        assert recomputation is not None
        return self._of_device(recomputation, device) - self._later(numel)

    def _of_device(self, recomputation: Recomputation, device: torch.device) -> float:
        total = torch.cuda.get_device_properties(device).total_memory
        own = (1 - self.of_samplers) * total - torch.cuda.memory_allocated(device)
        return own if self.takes_turns else min(own, recomputation.free())


SEQUENCES, LENGTH = 4, 64
RANK = 8
"""Of the probe's adapter. Other ranks keep little more or less: a row's product with lora_A has `rank` numbers, and its
inputs have thousands."""


def measure_row(base: BaseModel, targets: Sequence[Target]) -> None:
    """Run the forward of 256 rows, and drop what it keeps. `targets`: the layers that adapters will train; empty where
    the parameters themselves are trained. Ranks call it at the same time. Changes no weight."""
    length = min(LENGTH, base.max_context)
    tokens = np.random.default_rng(0).integers(0, base.vocab_size, (SEQUENCES, length))
    packed = pack_alone([Datum(each, {}) for each in tokens], base.device)
    trained = np.ones(tokens.size, np.bool_)
    of_rows = Targets.of(list(tokens), packed.layout.rows_of, trained, base.device)
    segment = LoraSegment(0, packed.stop, 1.0)
    if targets:
        adapter = Adapter(LoraSpec(RANK, float(RANK), seed=0), targets, base.device)
        segment = LoraSegment.of(0, packed.stop, adapter, adapter.leaves(True))
    with torch.enable_grad(), base.packed.active.use([segment]):
        base.packed([packed], [of_rows], [segment])
