"""The order of tools' results in a chat.

In other dialects a result names its call, and agents send results in the order in which their tools ended. Many
templates show no ids, so that a model takes the first result for that of the first call.
"""

from __future__ import annotations

from typing import Any


def in_order_of_calls(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages, with the results right after an answer in the order of its calls. A result of no such call stays
    behind them."""
    ordered: list[dict[str, Any]] = []
    places: dict[str, int] = {}
    results: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "tool":
            results.append(message)
            continue
        ordered += _sorted(results, places)
        ordered.append(message)
        calls = message.get("tool_calls") or ()
        places, results = {call["id"]: place for place, call in enumerate(calls)}, []
    return ordered + _sorted(results, places)


def _sorted(results: list[dict[str, Any]], places: dict[str, int]) -> list[dict[str, Any]]:
    return sorted(results, key=lambda result: places.get(result.get("tool_call_id", ""), len(places)))
