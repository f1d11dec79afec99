"""Triton's interpreter, with bfloat16 as on a GPU: float32 is rounded to the nearest, ties to even.

Triton 3.7 to 3.9's interpreter cuts the bits off, which makes errors of sums twice as large as on a GPU. In a matrix
product 3.7's takes the bits for whole numbers.
"""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import pytest
import torch


def compute_as_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Needs `TRITON_INTERPRET=1` before triton's first import."""
    from triton import language
    from triton.runtime import interpreter

    convert, multiply = interpreter._convert_float, interpreter.InterpreterBuilder.create_dot

    def converted(values: npt.NDArray[Any], source: Any, target: Any, rounding: Any) -> npt.NDArray[Any]:
        if (source, target) == (language.float32, language.bfloat16):
            return torch.from_numpy(values.copy()).bfloat16().view(torch.uint16).numpy()
        return convert(values, source, target, rounding)

    def multiplied(builder: Any, one: Any, other: Any, *others: Any) -> Any:
        if one.dtype == language.bfloat16:
            wide = [convert(each.data, language.bfloat16, language.float32, None) for each in (one, other)]
            one, other = (interpreter.TensorHandle(each.view("float32"), language.float32) for each in wide)
        return multiply(builder, one, other, *others)

    monkeypatch.setattr(interpreter, "_convert_float", converted)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", multiplied)
