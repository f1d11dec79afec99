"""RMS norms as one operation of torch forward and one backward, where transformers starts 8 and 14.

A layer of Qwen3 has four norms: 88 operations of some 200, and on a GPU each costs the host 5 µs or more. torch's own
operation is one kernel on CUDA. In float32 it gives transformers' bits on a CPU; in bfloat16 it rounds once, after the
product with the weight, where transformers rounds before it, too. Knows torch's operation and transformers' modules.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

EPSILONS = ("variance_epsilon", "eps")
"""What transformers' classes call it."""


def fuses_norms(device: torch.device) -> bool:
    """On a CPU torch's operation is made of as many others."""
    return device.type == "cuda"


def fuse_norms(model: nn.Module) -> int:
    """Let the model's plain RMS norms compute with torch's operation. Returns how many do. Norms of other formulas,
    with a gate or with 1 added to their weight, stay as they are."""
    plain: dict[type, bool] = {}
    fused = 0
    for module in model.modules():
        kind = type(module)
        if "RMSNorm" not in kind.__name__:
            continue
        if kind not in plain:
            plain[kind] = _is_plain(module)
        if plain[kind]:
            module.forward = functools.partial(_norm, module)
            fused += 1
    return fused


def _norm(module: Any, hidden_states: Tensor) -> Tensor:
    """hidden_states [..., size]; the result has its dtype."""
    return functional.rms_norm(hidden_states, module.weight.shape, module.weight, _epsilon(module))


def _epsilon(module: nn.Module) -> float:
    return next(getattr(module, name) for name in EPSILONS if hasattr(module, name))


@torch.no_grad()
def _is_plain(module: nn.Module) -> bool:
    """Whether the module computes what `_norm` does, tried with a small weight in its place."""
    if [name for name, _ in module.named_parameters()] != ["weight"] or not any(hasattr(module, e) for e in EPSILONS):
        return False
    tried = copy.copy(module)
    tried._parameters = {"weight": nn.Parameter(torch.linspace(0.5, 1.5, 8))}
    hidden = torch.linspace(-1, 2, 24).view(3, 8)
    try:
        expected = tried(hidden)
    except TypeError:  # it takes a gate, too
        return False
    return torch.allclose(_norm(tried, hidden), expected, rtol=1e-5, atol=1e-6)
