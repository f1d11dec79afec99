"""The memory of a training pass with adapters, as the trainer bounds it: by config.json and the memory of the machine.

The trainer cuts micro-batches and recomputes layers by the numbers here, and the estimate before a start uses the same.
Knows widths and bytes. Imports neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from skyrl.base.model_files import experts_of

FLOAT_BYTES = 4
FULL_BYTES = 16
"""Of a parameter that is trained: weight, gradient and two moments in float32."""
LOGITS_BYTES = 128 * 2**20
"""Size of one chunk of float32 logits on a CPU, and the least on CUDA."""
MOST_LOGITS_BYTES = 1280 * 2**20
"""Size of one chunk on CUDA where there is memory: 2,208 rows of 151,936 logits. Of few rows a product with the
vocabulary takes as long as the weight takes to be read: an H100 (989e12 operations/s and 3.35e12 bytes/s) multiplies
295 rows of bfloat16 in that time, and writes and reads their logits besides."""
LOGITS_SHARE = 1 / 32
"""On CUDA a chunk takes this share of the memory beside the model at most: 9 % for `LOGITS_CHUNKS` of them."""
LOGITS_CHUNKS = 3
"""The memory of so many chunks is in use while one is computed and goes backward."""
FIRST_GUESS = 2.0
"""Until it is measured: numbers that a layer keeps for a row, per input and output of its products. Qwen3, Qwen2, Llama
and Gemma 3 keep 0.7 to 1.1, Qwen3-MoE 0.8 to 1.7."""
SHARE = 0.5
"""What is kept for the backward may take this share of the free memory. The rest is for logits, gradients, and what the
backward itself computes."""
FREE_ANYHOW = 64 * 2**20
"""Activations of at most these bytes are kept without a look at the memory, which takes 50 µs."""
GAPS = 1.4
"""The memory of the process beside what is kept, whose heap has gaps: 1.3 to 1.5 of it were measured. None where each
block from 1 MiB on is a mapping of its own, which costs a fifth more time."""
LARGE_ROWS = 4096
"""On a CPU recomputed micro-batches with more rows give back to the kernel what they free: no gaps."""
BACKWARD_WIDTHS, IN_PIECES_WIDTHS = 6.0, 3.1
"""Tensors of the MLP's width in the backward of a layer, of transformers or in pieces, beside what is kept. Gemma 3 and
others need 5.0 to 5.5; in pieces Qwen2.5-0.5B and Llama-3.2-1B 2.0, SmolLM2-135M 2.6, Qwen3-0.6B 3.1."""
STEP_BUFFERS = 8
"""Buffers of an adapter's size during a step of AdamW: weights, gradient and two moments; the clipped gradient, both
new moments and new weights."""

_NORMS_OF_HEADS = ("qwen3", "gemma3", "gemma4", "hunyuan")
"""Starts of model types with norms of queries and keys."""
_NORMS_OF_RESULTS = ("gemma2", "gemma3", "gemma4")
"""And with norms of what attention and MLP give."""

_IN_PIECES = ("llama", "qwen2", "qwen3", "mistral", "smollm3", "qwen3_vl_text")
"""Model types whose layers `skyrl.trainer.model.layer_pieces` computes. The trainer tries it with torch, which takes
seconds and memory; a test compares."""


@dataclass(frozen=True)
class Bounds:
    """`least` and `most` rows, powers of two. What a micro-batch keeps may take `share` of the memory."""

    least: int
    most: int
    share: float


ON_CUDA = Bounds(4096, 65_536, 1 / 3)
"""Less than the half of the free memory from which on layers are recomputed: adapters that come later need memory too,
and should not make full micro-batches recompute their layers."""
ON_CPU = Bounds(2048, 4096, 1 / 2)
"""Smaller ones would cost more for prompts than recomputed layers do. Half of all memory, though a vLLM may run beside:
what a row keeps is guessed here, at 1.1 to 2.9 times of what it is."""


def logits_bytes_on_cuda(memory: float) -> int:
    """Of a chunk of float32 logits, where `memory` bytes of the GPU are left beside the model."""
    return int(min(max(LOGITS_SHARE * memory, LOGITS_BYTES), MOST_LOGITS_BYTES))


def rows_within(memory: float, of_row: float, bounds: Bounds) -> int:
    """The largest power of two of rows within the bounds that keep at most `bounds.share` of `memory` bytes, if each
    keeps `of_row` bytes; `bounds.least` where that is too much already."""
    rows = bounds.least
    while rows < bounds.most and 2 * rows * of_row <= bounds.share * memory:
        rows *= 2
    return rows


@dataclass(frozen=True)
class Widths:
    """The sizes of a dense model whose layers are attention and a gated MLP. `queries`, `keys`: heads × head width."""

    layers: int
    hidden: int
    between: int
    heads: int
    queries: int
    keys: int
    vocabulary: int
    model_type: str

    @staticmethod
    def of(model: Mapping[str, Any]) -> Widths | None:
        """By the text model's part of config.json; None for a mixture of experts, for layers that keep states, for
        latent attention, and where a size is missing."""
        other = ("linear_key_head_dim", "mamba_num_heads", "conv_L_cache", "kv_lora_rank")
        if experts_of(dict(model)) or any(name in model for name in other):
            return None
        try:
            heads, hidden = model["num_attention_heads"], model["hidden_size"]
            width = model.get("head_dim") or hidden // heads
            return Widths(
                layers=model["num_hidden_layers"],
                hidden=hidden,
                between=model["intermediate_size"],
                heads=heads,
                queries=heads * width,
                keys=(model.get("num_key_value_heads") or heads) * width,
                vocabulary=model["vocab_size"],
                model_type=model.get("model_type") or "",
            )
        except KeyError:
            return None

    @property
    def in_pieces(self) -> bool:
        return self.model_type in _IN_PIECES

    @property
    def products(self) -> int:
        """Inputs and outputs of the linear layers of a decoder layer."""
        return 7 * self.hidden + 2 * self.queries + 2 * self.keys + 3 * self.between

    def adapter_numbers(self, rank: int) -> int:
        """The numbers of an adapter on all linear layers and the output layer."""
        return rank * (self.layers * self.products + self.hidden + self.vocabulary)

    def kept_numbers(self, rank: int) -> int:
        """The numbers that a decoder layer keeps for the backward of a row: inputs of its norms and, unless it computes
        in pieces, their results; queries, keys, values and the result of attention with the norm of each head; gate and
        up of the MLP, whose product is computed again; of each adapted layer the low-rank row."""
        norms, of_heads = 2, 0
        results = 2 if self.model_type.startswith(_NORMS_OF_RESULTS) else 0
        if self.model_type.startswith(_NORMS_OF_HEADS):
            of_heads = self.queries + self.keys + self.heads + self.keys * self.heads // self.queries
        attention = 2 * self.queries + 2 * self.keys + self.heads + of_heads
        kept = norms if self.in_pieces else 2 * norms
        return (kept + results) * self.hidden + norms + results + attention + 2 * self.between + 7 * rank


@dataclass(frozen=True)
class Passing:
    """The largest micro-batch of a trainer on a CPU. `rows`: of a full one. `longest`: the longest sequence, which runs
    alone if it is longer."""

    widths: Widths
    rank: int
    rows: int
    longest: int

    @staticmethod
    def of(widths: Widths, rank: int, memory: float, given: int | None, longest: int) -> Passing:
        """`memory`: bytes beside the base model, whatever others use now. `given`: `trainer.micro_batch_tokens`."""
        of_row = FIRST_GUESS * FLOAT_BYTES * widths.layers * widths.products
        return Passing(widths, rank, given or rows_within(memory, of_row, ON_CPU), longest)

    @property
    def adapter(self) -> float:
        """Bytes of an adapter's weights."""
        return float(FLOAT_BYTES * self.widths.adapter_numbers(self.rank))

    @property
    def in_training(self) -> float:
        """Bytes of an adapter in training: weights, gradient and two moments."""
        return 4 * self.adapter

    def kept(self, rows: int) -> float:
        """Bytes that a micro-batch keeps for its backward."""
        return float(FLOAT_BYTES * rows * self.widths.layers * self.widths.kept_numbers(self.rank))

    def recomputed(self, rows: int) -> float:
        """The same if its layers are computed again: the input of each, and what one keeps."""
        return FLOAT_BYTES * rows * self.widths.layers * self.widths.hidden + self.kept(rows) / self.widths.layers

    def logits(self, trained: int) -> float:
        """Of `trained` rows with targets: three chunks."""
        return float(LOGITS_CHUNKS * min(LOGITS_BYTES, FLOAT_BYTES * trained * self.widths.vocabulary))

    def peak(self, rows: int, free: float, *, trained: int | None = None) -> float:
        """Bytes beside a resting trainer while an adapter trains on a micro-batch of `rows` rows, of which `trained`
        have targets (None: all), or during the step of its optimizer. `free`: what the host has left before."""
        kept = GAPS * self.kept(rows)
        if self.kept(rows) > self.allowed(free):
            kept = (1.0 if rows > LARGE_ROWS else GAPS) * self.recomputed(rows)
        return self._with(kept, rows, rows if trained is None else trained)

    @staticmethod
    def allowed(free: float) -> float:
        """Bytes that a micro-batch keeps at most without recomputing its layers."""
        return max(FREE_ANYHOW, SHARE * free)

    def worst(self, free: float) -> tuple[float, str]:
        """The largest peak of all micro-batches, and what decides it. Where layers of the largest one are computed
        again, a smaller one may keep as much as is allowed."""
        rows = max(self.rows, self.longest)
        if self.kept(rows) <= self.allowed(free):
            return self.peak(rows, free), f"in a micro-batch of {rows:,} rows"
        most = int(rows * self.allowed(free) / self.kept(rows))
        smaller = self._with(GAPS * self.kept(most), most, most)
        largest = self.peak(rows, free)
        if largest > smaller:
            return largest, f"in a micro-batch of {rows:,} rows, whose layers are computed again"
        return smaller, f"in a micro-batch of {most:,} rows: larger ones have their layers computed again"

    def _with(self, kept: float, rows: int, trained: int) -> float:
        tensors = IN_PIECES_WIDTHS if self.widths.in_pieces else BACKWARD_WIDTHS
        backward = FLOAT_BYTES * rows * tensors * self.widths.between
        return max(kept + max(self.logits(trained), backward) + self.in_training, STEP_BUFFERS * self.adapter)
