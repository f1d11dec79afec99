"""Triton's interpreter, with float32 rounded to bfloat16 as a GPU rounds: to the nearest, ties to even.

Triton 3.7 to 3.9's interpreter cuts the bits off, which makes errors of sums twice as large as on a GPU.
"""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import pytest
import torch


def round_as_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Needs `TRITON_INTERPRET=1` before triton's first import."""
    from triton import language
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def converted(values: npt.NDArray[Any], source: Any, target: Any, rounding: Any) -> npt.NDArray[Any]:
        if (source, target) == (language.float32, language.bfloat16):
            return torch.from_numpy(values.copy()).bfloat16().view(torch.uint16).numpy()
        return convert(values, source, target, rounding)

    monkeypatch.setattr(interpreter, "_convert_float", converted)
