"""Arithmetic on measured series."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np


def quantile(values: Sequence[float], q: float) -> float:
    """The quantile `q`; NaN if there are no values."""
    return float(np.quantile(values, q)) if len(values) else float("nan")


def slope(times: Sequence[float], values: Sequence[float]) -> float:
    """Change of `values` per unit of `times`, by least squares; 0 for fewer than two points."""
    if len(times) < 2:
        return 0.0
    return float(np.polyfit(np.asarray(times, float), np.asarray(values, float), 1)[0])


def drift(times: Sequence[float], values: Sequence[float]) -> float:
    """The change of a series from its first to its last time along its slope, divided by its median."""
    if len(times) < 2:
        return 0.0
    median = quantile(values, 0.5)
    return slope(times, values) * (times[-1] - times[0]) / median if median else 0.0


def without_nan(value: Any) -> Any:
    """The same lists and dictionaries with None for NaN, because JSON has no NaN."""
    if isinstance(value, dict):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_nan(item) for item in value]
    return None if isinstance(value, float) and math.isnan(value) else value
