"""The operations of custom losses: a table from names to functions, which are all that a graph can run.

Each takes tensors and numbers, changes none of its arguments and reads nothing else. What Python accepts beside that,
such as a string times a number, is refused here. Knows nothing of graphs and of bounds.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from skyrl.base.types import custom_loss as names

Operation = Callable[..., Any]

MAX_EXPONENT = 64
"""Of an integer. The power of a tensor has no bound."""

Number = int | float


def _numeric(function: Operation) -> Operation:
    """Of tensors and numbers only. A whole number stays within 64 bits."""

    def checked(*args: Any) -> Any:
        if not all(isinstance(each, Tensor | Number) for each in args):
            raise TypeError("takes tensors and numbers")
        result = function(*args)
        if not isinstance(result, Tensor | Number):
            raise TypeError("gives no tensor and no real number")
        if isinstance(result, int) and abs(result) >= 2**63:
            raise OverflowError("the result does not fit 64 bits")
        return result

    return checked


def _power(base: Any, exponent: Any) -> Any:
    if isinstance(base, int) and isinstance(exponent, int) and abs(exponent) > MAX_EXPONENT:
        raise OverflowError(f"the exponent of an integer may be at most {MAX_EXPONENT}")
    return operator.pow(base, exponent)


def _divides(function: Operation) -> Operation:
    """Whole numbers rounded towards 0 are refused: torch 2.13 ends the process for some of them."""

    def checked(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("rounding_mode") == "trunc" and not any(_is_floating(each) for each in (*args, *kwargs.values())):
            raise TypeError("rounding_mode trunc takes no whole numbers; make them floating-point numbers first")
        return function(*args, **kwargs)

    return checked


def _is_floating(value: Any) -> bool:
    return isinstance(value, float) or (isinstance(value, Tensor) and value.is_floating_point())


_DIVISIONS = ("div", "divide")


def _item(value: Any, index: Any) -> Any:
    if not isinstance(value, Tensor | tuple) or (isinstance(value, tuple) and not isinstance(index, int | slice)):
        raise TypeError("takes a tensor, or a tuple and a whole number")
    return value[index]


def _result(value: Any, place: int) -> Tensor:
    """The values or the indices of what operations such as `sort` give."""
    if not isinstance(value, tuple) or len(value) != 2 or not isinstance(value[place], Tensor):
        raise TypeError("only results such as those of max and sort with a dimension have values and indices")
    return value[place]


_ATTRIBUTES: dict[str, Callable[[Tensor], Any]] = {
    "T": lambda tensor: tensor.t(),
    "device": lambda tensor: tensor.device,
    "dtype": lambda tensor: tensor.dtype,
    "mT": lambda tensor: tensor.transpose(-2, -1),
    "ndim": lambda tensor: tensor.dim(),
    "shape": lambda tensor: tensor.size(),
}
_RESULTS = {"values": 0, "indices": 1}


def _attribute(value: Any, name: str) -> Any:
    if name in _RESULTS:
        return _result(value, _RESULTS[name])
    if not isinstance(value, Tensor):
        raise TypeError(f"only a tensor has {name}")
    return _ATTRIBUTES[name](value)


def _method(function: Operation) -> Operation:
    def checked(value: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(value, Tensor):
            raise TypeError("is a method of tensors")
        return function(value, *args, **kwargs)

    return checked


def _to(value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """The loss has one device."""
    kept = [each for each in args if each != "cpu" and not isinstance(each, torch.device)]
    kwargs = {name: each for name, each in kwargs.items() if name != "device"}
    return value.to(*kept, **kwargs) if kept or kwargs else value


MASKED = frozenset(("operator.getitem", "masked_select", "torch.masked_select"))
"""Operations whose result may have a size that follows from values."""

PRODUCTS = frozenset(("matmul", "mm", "mv", "bmm", "dot", "inner"))
"""Operations with as many products for each number of their result as their first argument has columns."""

COMBINING = PRODUCTS | {
    "outer",
    "cat",
    "concat",
    "stack",
    "gather",
    "take",
    "take_along_dim",
    "index_select",
    "quantile",
}
"""Operations whose result has at most as many numbers as the product of the sizes of their arguments, or their sum."""

SIZED = names.CREATIONS | frozenset(
    ("diag", "expand", "new_full", "new_ones", "new_zeros", "one_hot", "pad", "repeat", "tile", "unfold", "view")
)
"""Operations whose result has a size that follows from numbers among their arguments. That of all others, but for the
last two kinds, is at most what its arguments make together when they are broadcast."""

FUNCTIONS: dict[str, Operation] = {
    "getattr": _attribute,
    "operator.getitem": _item,
    **{f"operator.{name}": _numeric(getattr(operator, name)) for name in names.OPERATORS - {"getitem", "pow"}},
    "operator.pow": _numeric(_power),
    **{f"math.{name}": _numeric(getattr(math, name)) for name in names.MATH},
    **{f"torch.{name}": getattr(torch, name) for name in names.FUNCTIONS},
    **{f"torch.nn.functional.{name}": getattr(torch.nn.functional, name) for name in names.FUNCTIONAL},
    **{f"torch.special.{name}": getattr(torch.special, name) for name in names.SPECIAL},
}
FUNCTIONS |= {name: _divides(FUNCTIONS[name]) for name in (f"torch.{each}" for each in _DIVISIONS)}
METHODS: dict[str, Operation] = {
    **{name: _method(getattr(Tensor, name)) for name in names.METHODS - {"to", "cpu"}},
    "to": _method(_to),
    "cpu": _method(_to),
}
METHODS |= {name: _divides(METHODS[name]) for name in _DIVISIONS}
