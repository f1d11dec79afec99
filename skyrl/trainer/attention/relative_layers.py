"""Inkling's attention over packed rows, whose scores have a bias for the distance between query and key.

transformers makes the biases of all queries and keys at once, and counts both, and the positions of its scaling of long
texts, from the first row. `install` lets its modules compute packed rows with the positions of their sequences, where
the layout of the rows is given, and as they are otherwise. Knows transformers' modules. Knows nothing of adapters or of
how rows are packed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from skyrl.trainer.attention.packed_attention import segments_attention
from skyrl.trainer.attention.recurrent import ROWS, PackedRows
from skyrl.trainer.attention.relative import RelativeBias, bias_of

PROFILES = "rel_logits_proj"
"""The module of an attention that makes the biases."""


def install(layers: Iterable[nn.Module]) -> None:
    """Make attention with such biases among the decoder layers take packed rows.

    Raises ValueError for an attention that makes its biases in another way."""
    for layer in layers:
        for module in layer.modules():
            if isinstance(getattr(module, PROFILES, None), nn.Module):
                _check(module)
                _take(module)


@torch.no_grad()
def _check(module: Any) -> None:
    """Compare the biases with those of `bias_of`, also at the profiles' end."""
    made = module.rel_logits_proj
    profiles: Any = getattr(made, "proj", None)
    known = isinstance(profiles, Tensor) and profiles.ndim == 2 and profiles.shape[1] == getattr(made, "rel_extent", 0)
    if known and not profiles.is_meta:
        extent = profiles.shape[1]
        queries = torch.tensor([0, extent - 1, extent, extent + 1], device=profiles.device)
        keys = torch.arange(extent + 2, device=profiles.device)
        states = torch.linspace(-1, 1, 8 * len(profiles), device=profiles.device, dtype=profiles.dtype)
        states = states.view(1, 4, 2, -1)
        expected = made(states, queries, keys)
        own = bias_of(states.transpose(1, 2), profiles, queries[:, None] - keys)
        known = torch.allclose(own, expected, rtol=0.02, atol=1e-3 * float(expected.abs().max()))
    if not known:
        raise ValueError(f"{type(module).__name__} has a position bias of a kind that is not known")


def _take(module: Any) -> None:
    stock = module.forward

    def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        packed: PackedRows | None = kwargs.get(ROWS)
        if packed is None:
            return stock(hidden_states, *args, **kwargs)
        return _attention(module, hidden_states, packed, kwargs["attention_groups"]), None

    module.forward = forward
    module.takes_relative_bias = True


def _attention(module: Any, hidden: Tensor, packed: PackedRows, attention_groups: Any) -> Tensor:
    """What transformers' module computes of rows. hidden: [1, rows, hidden]; returns the same."""
    shape = (*hidden.shape[:-1], -1, module.head_dim)
    query = module.q_norm(module.q_proj(hidden).view(shape)).transpose(1, 2)
    key = module.k_norm(module.k_sconv(module.k_proj(hidden)).view(shape)).transpose(1, 2)
    value = module.v_sconv(module.v_proj(hidden)).view(shape).transpose(1, 2)
    states = module.r_proj(hidden).view(*hidden.shape[:-1], module.num_heads, -1).transpose(1, 2)
    floor = module.config.log_scaling_n_floor
    if not module.is_sliding and floor is not None:
        places = (packed.positions + 1).float()
        tau = (1.0 + module.config.log_scaling_alpha * torch.log((places / floor).clamp(min=1.0)))[:, None]
        query, states = ((each.float() * tau).to(each.dtype) for each in (query, states))
    made, _ = segments_attention(
        module,
        query,
        key,
        value,
        None,
        attention_groups=attention_groups,
        scaling=module.scaling,
        sliding_window=module.sliding_window,
        relative=RelativeBias(states, module.rel_logits_proj.proj),
    )
    return module.o_proj(made.flatten(2))
