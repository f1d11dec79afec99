"""Stop strings of a sample that comes in several parts: an engine looks for them in each part alone.

A part that ends with the beginning of a stop string is continued by one token at a time, until the string is complete
or cannot be any more. So the sample ends with the token that completes the string, as an uninterrupted one does.
"""

from __future__ import annotations

from collections.abc import Sequence

from skyrl.rollout.messages import SamplingParams


def stops_of(params: SamplingParams) -> tuple[str, ...]:
    """The stop strings, in the order in which engines look for them."""
    return (params.stop,) if isinstance(params.stop, str) else tuple(params.stop or ())


def may_have_begun(text: str, stops: Sequence[str]) -> bool:
    """Whether `text` ends with the beginning of a stop string."""
    return any(text.endswith(stop[:length]) for stop in stops for length in range(1, len(stop)))


def cut_at_stop(text: str, seen: int, params: SamplingParams) -> str | None:
    """`text` as an engine gives it that finds a stop string: without the string, or up to its end with `no_stop_trim`.
    None if no stop string ends behind the first `seen` characters."""
    for stop in stops_of(params):
        start = text.find(stop, max(0, seen - len(stop) + 1))
        if start >= 0:
            return text[: start + len(stop)] if params.no_stop_trim else text[:start]
    return None
