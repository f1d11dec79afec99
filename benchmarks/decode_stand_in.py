"""A stand-in for vLLM's decoding: it keeps a device as busy as vLLM's decode does, without vLLM or a network.

Not vLLM: no scheduler, no pages of its cache, no requests that come and go, and nobody reads its tokens. What a decode
step does to the GPU is there: products of one row for each sequence, so that all weights are read for 32 rows; the keys
and values of the whole context read for each sequence; greedy sampling from the logits. On CUDA a step is one CUDA
graph, as in vLLM, and the host waits for each step's tokens. Weights are random numbers of the model's shape.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.models import Shape

HEAD = 128
EPS = 1e-6


@dataclass(frozen=True)
class _Layer:
    """attention: [queries + keys + values, hidden]; output: [hidden, queries]; gate_up: [2 between, hidden]; down:
    [hidden, between]; keys, values: [sequences, kv_heads, context, head]."""

    attention: Tensor
    output: Tensor
    gate_up: Tensor
    down: Tensor
    keys: Tensor
    values: Tensor


class Decode:
    """Decode steps of `sequences` sequences that have `context` tokens each. `model`: a directory with config.json."""

    def __init__(self, model: str, device: torch.device, *, sequences: int = 32, context: int = 1024) -> None:
        shape = Shape(Path(model))
        self._device = device
        self._dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self._head = min(HEAD, shape.keys)
        self._sizes = shape.queries, shape.keys
        hidden, between = shape.hidden, shape.between
        cache = (sequences, shape.keys // self._head, context, self._head)
        self._layers = [
            _Layer(
                self._drawn(shape.queries + 2 * shape.keys, hidden),
                self._drawn(hidden, shape.queries),
                self._drawn(2 * between, hidden),
                self._drawn(hidden, between),
                self._drawn(*cache),
                self._drawn(*cache),
            )
            for _ in range(shape.layers)
        ]
        self._embeddings = self._drawn(shape.vocabulary, hidden)
        self._tokens = torch.zeros(sequences, dtype=torch.int64, device=device)
        self._graph: torch.cuda.CUDAGraph | None = None
        if device.type == "cuda":
            self._capture()

    def _drawn(self, *sizes: int) -> Tensor:
        return 0.02 * torch.randn(sizes, dtype=self._dtype, device=self._device)

    def _capture(self) -> None:
        """The rules of torch.cuda.graph: some steps on another stream before."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._compute()
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._compute()

    @torch.no_grad()
    def _compute(self) -> None:
        """Writes the next token of each sequence in the place of the last one."""
        hidden = functional.embedding(self._tokens, self._embeddings)
        for layer in self._layers:
            hidden = hidden + self._attended(layer, self._normed(hidden))
            gate, up = functional.linear(self._normed(hidden), layer.gate_up).chunk(2, dim=-1)
            hidden = hidden + functional.linear(functional.silu(gate) * up, layer.down)
        self._tokens.copy_(functional.linear(self._normed(hidden), self._embeddings).argmax(-1))

    def _normed(self, hidden: Tensor) -> Tensor:
        return functional.rms_norm(hidden, hidden.shape[-1:], eps=EPS)

    def _attended(self, layer: _Layer, hidden: Tensor) -> Tensor:
        queries, keys = self._sizes
        query, key, value = functional.linear(hidden, layer.attention).split([queries, keys, keys], dim=-1)
        for cache, new in ((layer.keys, key), (layer.values, value)):
            cache[:, :, -1] = new.unflatten(-1, (-1, self._head))
        states = query.unflatten(-1, (-1, self._head))[:, :, None]
        found = functional.scaled_dot_product_attention(states, layer.keys, layer.values, enable_gqa=True)
        return functional.linear(found.flatten(1), layer.output)

    def step(self) -> int:
        """One token for each sequence; returns their number. Waits for the device."""
        if self._graph is None:
            self._compute()
        else:
            self._graph.replay()
        self._tokens.tolist()
        return len(self._tokens)
