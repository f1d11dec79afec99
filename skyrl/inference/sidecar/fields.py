"""Reads single fields of a request. Each function raises BadRequest, with the field's name, for a wrong value."""

from __future__ import annotations

import math
from typing import Any

from skyrl.inference.sidecar.errors import BadRequest

INT64_MAX = 2**63 - 1


def integer(name: str, value: Any, low: int, high: int = INT64_MAX) -> int:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadRequest(f"{name}: must be an integer, got {_shown(value)}")
    if not low <= value <= high:
        raise BadRequest(f"{name}: must be {_range(low, high)}, got {value}")
    return value


def number(name: str, value: Any, low: float, high: float = math.inf, *, above: bool = False) -> float:
    """With `above`, the value must be greater than `low`."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise BadRequest(f"{name}: must be a number, got {_shown(value)}")
    if value < low or value > high or (above and value == low):
        lower = f"greater than {low:g}" if above else f"at least {low:g}"
        upper = "" if high == math.inf else f" and at most {high:g}"
        raise BadRequest(f"{name}: must be {lower}{upper}, got {value:g}")
    return value


def boolean(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise BadRequest(f"{name}: must be true or false, got {_shown(value)}")
    return value


def string(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise BadRequest(f"{name}: must be a string, got {_shown(value)}")
    return value


def token_ids(name: str, value: Any) -> list[int]:
    """A list of token ids that is not empty. Checked in one pass: prompts have thousands of tokens."""
    if not isinstance(value, list) or not value:
        raise BadRequest(f"{name}: must be a list of token ids that is not empty")
    for token in value:
        if type(token) is not int or not 0 <= token <= INT64_MAX:
            raise BadRequest(f"{name}: {_shown(token)} is not a token id")
    return value


def mapping(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BadRequest(f"{name}: must be an object, got {_shown(value)}")
    return value


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


def _range(low: int, high: int) -> str:
    return f"at least {low}" if high >= INT64_MAX else f"between {low} and {high}"
