"""Chooses what computes `between`'s functions: plain torch, torch.compile, or own Triton kernels.

Through torch.compile each function becomes one or a few kernels, which torch's inductor writes. It is compiled at its
first call with a dtype, a width and strides, for any number of rows from two on. Plain torch computes fewer rows:
torch.compile takes a size of 0 or 1 for a constant. Compiled code is kept in `TORCHINDUCTOR_CACHE_DIR`, where later
processes find it. Knows nothing of formulas.
"""

from __future__ import annotations

import functools
import inspect
import os
import shutil
from collections.abc import Callable
from dataclasses import fields, replace
from importlib.util import find_spec
from typing import Any, TypeVar

import torch
from torch import Tensor

from skyrl.base.config.backend import ConfigError, Kernels
from skyrl.trainer.kernels.between import IN_TORCH, Between
from skyrl.trainer.kernels.fused_norms import in_torch

_MOST_VARIANTS = 64
"""Of one function: models, kinds of heads, dtypes and strides of one process. Beyond that a call raises an error."""

Function = TypeVar("Function", bound=Callable[..., Any])


def between_for(kernels: Kernels, device: torch.device) -> Between:
    """The functions of the setting `trainer.kernels` on this device.

    Raises ConfigError where they cannot work: a package or a compiler is missing, or Triton's kernels have no GPU."""
    if kernels == "torch":
        return in_torch(device)
    if kernels == "triton" and device.type != "cuda":
        raise ConfigError(f'trainer.kernels: "triton" needs a GPU, and the trainer computes on {device.type}')
    if device.type == "cuda" and find_spec("triton") is None:
        raise ConfigError(f'trainer.kernels: "{kernels}" needs the package triton, which comes with torch for CUDA')
    if kernels == "compiled" and "isolate_recompiles" not in inspect.signature(torch.compile).parameters:
        raise ConfigError(f'trainer.kernels: "compiled" needs a newer torch than {torch.__version__}')
    _check_compiler(kernels, device)
    if kernels == "compiled":
        return compiled()
    from skyrl.trainer.kernels.triton_kernels import IN_TRITON  # where there is the package

    return IN_TRITON


def _check_compiler(kernels: Kernels, device: torch.device) -> None:
    """Triton compiles the start of each kernel as C, and inductor a CPU's kernels as C++."""
    variable, names = ("CC", ["gcc", "clang"]) if device.type == "cuda" else ("CXX", ["g++"])
    names = os.environ.get(variable, "").split()[:1] or names
    if not any(map(shutil.which, names)):
        raise ConfigError(f'trainer.kernels: "{kernels}" needs a compiler, and there is no {" or ".join(names)}')


@functools.cache
def compiled(backend: str = "inductor") -> Between:
    """All functions, compiled once in a process, but the product in groups, which stays torch's. backend: one of
    torch.compile's."""
    names = [field.name for field in fields(Between) if field.name != "add_grouped"]
    return replace(IN_TORCH, **{name: _compiled(getattr(IN_TORCH, name), backend) for name in names})


def _compiled(function: Function, backend: str) -> Function:
    names = tuple(inspect.signature(function).parameters)

    def of_copies(*arguments: Any) -> Any:
        """Some functions write into their arguments. Compiled code would write these tensors in vain; it makes no
        copies."""
        return function(*(each.clone() if isinstance(each, Tensor) else each for each in arguments))

    options: Any = {"isolate_recompiles": True, "recompile_limit": _MOST_VARIANTS}
    quick = torch.compile(of_copies, fullgraph=True, dynamic=False, backend=backend, **options)

    @functools.wraps(function)
    def call(*arguments: Any) -> Any:
        # a tensor that requires a gradient, or a call with gradients on, would be compiled once more
        with torch.no_grad():
            if len(arguments[0]) < 2:
                return function(*(each.detach() if isinstance(each, Tensor) else each for each in arguments))
            return quick(*(_of_any_rows(name, each) for name, each in zip(names, arguments, strict=True)))

    return call  # pyright: ignore[reportReturnType]  # of the same signature


def _of_any_rows(name: str, argument: Any) -> Any:
    if not isinstance(argument, Tensor):
        return argument
    argument = argument.detach()
    if name != "weight":
        torch._dynamo.mark_dynamic(argument, 0)
    return argument
