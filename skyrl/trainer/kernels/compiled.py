"""The functions of `between` through torch.compile: each becomes one or two kernels, which torch's inductor writes.

A function is compiled at its first call with a dtype, a width and strides, for any number of rows from two on. Plain
torch computes fewer rows: torch.compile takes a size of 0 or 1 for a constant. Compiled code is kept on disk, in
`TORCHINDUCTOR_CACHE_DIR`, where later processes find it. Knows nothing of formulas.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeVar

import torch
from torch import Tensor

from skyrl.trainer.kernels import between
from skyrl.trainer.kernels.between import IN_TORCH, Between

_MOST_VARIANTS = 64
"""Of one function: models, kinds of heads, dtypes and strides of one process. Beyond that a call raises an error."""

Function = TypeVar("Function", bound=Callable[..., Any])


@functools.cache
def compiled(backend: str = "inductor") -> Between:
    """All functions, compiled once in a process. backend: a backend of torch.compile."""
    return Between(**{field.name: _compiled(getattr(IN_TORCH, field.name), backend) for field in fields(Between)})


def _compiled(function: Function, backend: str) -> Function:
    names = tuple(inspect.signature(function).parameters)

    def of_copies(*arguments: Any) -> Any:
        """The function writes into its first argument. In compiled code that would be one more tensor to write; the
        copy is none, because the compiler removes it."""
        return function(arguments[0].clone(), *arguments[1:])

    quick = torch.compile(
        of_copies, fullgraph=True, dynamic=False, backend=backend, isolate_recompiles=True, recompile_limit=_MOST_VARIANTS
    )

    @functools.wraps(function)
    def call(*arguments: Any) -> Any:
        if len(arguments[0]) < 2:
            return function(*arguments)
        # a tensor that requires a gradient, or a call with gradients on, would be compiled once more
        with torch.no_grad():
            return quick(*(_of_any_rows(name, each) for name, each in zip(names, arguments, strict=True)))

    return call  # pyright: ignore[reportReturnType]  # of the same signature


def _of_any_rows(name: str, argument: Any) -> Any:
    if not isinstance(argument, Tensor):
        return argument
    argument = argument.detach()
    if name != "weight":
        torch._dynamo.mark_dynamic(argument, 0)
    return argument
