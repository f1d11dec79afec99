"""The tensors of a bucket, as a request describes them."""

from __future__ import annotations

import torch

from skyrl.inference.vllm_plugin.weights.errors import WeightsError
from skyrl.weights.dtypes import NAMED


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
        kind = NAMED.get(dtype.removeprefix("torch."))
        if kind is None:
            raise WeightsError(f"dtypes: {dtype!r}, of {name}, is not one of {', '.join(NAMED)}")
        plan.append((name, kind, tuple(shape), elements(shape) * kind.itemsize))
    return plan


def elements(shape: list[int] | tuple[int, ...]) -> int:
    """How many elements a tensor of this shape has."""
    product = 1
    for size in shape:
        product *= size
    return product
