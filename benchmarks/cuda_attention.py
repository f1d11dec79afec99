"""torch's attention as one operation forward and one backward, as CUDA's fused kernels have it, for tensors on the meta
device: there torch would compute it of many others. Its kernel for sequences of any lengths works there; only their
lengths are numbers of the device, so a tensor of them is told how many pairs of queries and keys they make.

Computes shapes alone. Knows nothing of what is counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional

from skyrl.trainer.attention import varlen

FORWARD, BACKWARD = "attention", "attention_backward"
VARLEN, VARLEN_BACKWARD = "_varlen_attn", "_varlen_attn_backward"


_NAMES = [f"skyrl_benchmarks::{name}" for name in (FORWARD, BACKWARD)]
_STATES = "Tensor query, Tensor key, Tensor value, "
_MASK = "Tensor? mask, bool causal"
torch.library.define(_NAMES[0], f"({_STATES}{_MASK}) -> (Tensor, Tensor)")
torch.library.define(
    _NAMES[1], f"(Tensor gradient, {_STATES}Tensor output, Tensor norms, {_MASK}) -> (Tensor, Tensor, Tensor)"
)


@torch.library.register_fake(_NAMES[0])
def _(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    output = torch.empty_like(query[..., : value.shape[-1]])
    return output, query.new_empty(query.shape[:-1], dtype=torch.float32)


@torch.library.register_fake(_NAMES[1])
def _(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, mask, ctx.causal = inputs
    ctx.set_materialize_grads(False)  # else zeros are made for the norms, which nothing reads
    ctx.save_for_backward(query, key, value, *output, mask)


def _gradient(ctx: Any, gradient: Tensor, of_norms: Tensor | None) -> tuple[Any, ...]:
    backward = torch.ops.skyrl_benchmarks.attention_backward
    return *backward(gradient, *ctx.saved_tensors, ctx.causal), None, None


torch.library.register_autograd(_NAMES[0], _gradient, setup_context=_keep)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    return torch.ops.skyrl_benchmarks.attention(query, key, value, attn_mask, is_causal)[0]


@contextmanager
def attention_as_on_cuda() -> Iterator[None]:
    with (
        patch.object(functional, "scaled_dot_product_attention", _attention),
        patch.object(varlen, "_call", _with_pairs),
    ):
        yield


_call = varlen._call


def _with_pairs(queries: Any, keys: Any, window: tuple[int, int], *others: Any) -> varlen.Call:
    """As `varlen._call`."""
    made: Any = _call(queries, keys, window, *others)
    assert window in (varlen.CAUSAL, varlen.UNBOUNDED)
    unseen = (queries * (queries - 1) // 2).sum() if window == varlen.CAUSAL else 0
    made.queries.pairs = int((queries * keys).sum() - unseen)
    return made
