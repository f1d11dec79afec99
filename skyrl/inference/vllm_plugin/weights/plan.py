"""The tensors of a bucket, as a request describes them."""

from __future__ import annotations

import torch

from skyrl.inference.vllm_plugin.weights.errors import WeightsError

FLOATS = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
INTEGERS = ("int64", "int32", "int16", "int8", "uint8", "bool")


def plan_of(
    names: list[str], dtypes: list[str], shapes: list[list[int]]
) -> list[tuple[str, torch.dtype, tuple[int, ...], int]]:
    """Name, dtype, shape and bytes of each tensor. Raises WeightsError."""
    if not len(names) == len(dtypes) == len(shapes):
        raise WeightsError(
            f"{len(names)} names, {len(dtypes)} dtypes and {len(shapes)} shapes: the numbers must be equal"
        )
    if len(set(names)) != len(names):
        raise WeightsError("names: a name occurs twice")
    plan = []
    for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
        short = dtype.removeprefix("torch.")
        if short not in FLOATS + INTEGERS:
            raise WeightsError(f"dtypes: {dtype!r} is not a dtype of torch")
        kind: torch.dtype = getattr(torch, short)
        plan.append((name, kind, tuple(shape), elements(shape) * kind.itemsize))
    return plan


def elements(shape: list[int] | tuple[int, ...]) -> int:
    """How many elements a tensor of this shape has."""
    product = 1
    for size in shape:
        product *= size
    return product
