"""Gated MLPs whose backward computes their wide product again, instead of keeping it.

down_proj(activation(gate_proj(x)) * up_proj(x)) keeps four tensors of the MLP's width for its backward: both
projections, the activated gate, and the product. Two of them are cheap to compute again. Knows transformers' names of
the projections. Knows nothing of how a product is computed.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from skyrl.training.backends.torch_lora.lora import MultiLoraLinear

PARTS = ("gate_proj", "up_proj", "down_proj", "act_fn")


def keep_less(model: nn.Module) -> int:
    """Let the model's plain gated MLPs, with layers that adapters train, compute their product again. Returns how many
    do. MLPs of other formulas stay as they are."""
    plain: dict[type, bool] = {}
    found = 0
    for module in model.modules():
        kind: Any = type(module)
        if not isinstance(getattr(module, "down_proj", None), MultiLoraLinear):
            continue
        if kind not in plain:
            plain[kind] = all(hasattr(module, part) for part in PARTS) and _is_plain(kind, module.act_fn)
        if plain[kind]:
            module.forward = functools.partial(_gated, module)
            found += 1
    return found


def _gated(module: Any, x: Tensor) -> Tensor:
    """x [..., hidden]; the result has its shape."""
    return module.down_proj.of_gated(module.gate_proj(x), module.up_proj(x), module.act_fn)


def _is_plain(kind: Any, activation: Any) -> bool:
    """Whether modules of this class compute what `_gated` does, tried with simple functions as their layers."""
    tried = SimpleNamespace(
        gate_proj=lambda x: 2 * x, up_proj=lambda x: x + 1, down_proj=lambda x: x - 3, act_fn=activation
    )
    x = torch.linspace(-2, 2, 9)
    try:
        return torch.equal(kind.forward(tried, x), activation(2 * x) * (x + 1) - 3)
    except Exception:  # it needs more than these four: its formula is another one
        return False
