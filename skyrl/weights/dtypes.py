"""The dtypes in which tensors of a model travel to servers. Imports torch alone: vLLM's workers import it too."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from skyrl.weights.digests import dtype_name

FLOATS = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
)
INTEGERS = (
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint64,
    torch.uint32,
    torch.uint16,
    torch.uint8,
    torch.bool,
)
COMPLEX = (torch.complex128, torch.complex64, torch.complex32)
"""No model is updated in these. A trainer's own broadcast carries them, so they are received before they are
refused."""


NAMED = {dtype_name(dtype): dtype for dtype in FLOATS + INTEGERS + COMPLEX}


def check_sent(part: Mapping[str, torch.Tensor]) -> None:
    """Raises ValueError for a tensor of a dtype that servers do not take. Call it before anything of the part is
    announced: a group in which an announced tensor does not come cannot be used again."""
    for name, tensor in part.items():
        if tensor.dtype not in FLOATS + INTEGERS:
            raise ValueError(f"{name} is {dtype_name(tensor.dtype)}, which servers do not take: cast it before")
