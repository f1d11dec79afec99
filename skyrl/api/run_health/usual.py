"""When a number of a run leaves what was usual for it: robust statistics of the run's own past. Pure functions.

The level of a series at a point is the median of its last RECENT values, so that one odd step says nothing. The usual
is the median of up to REFERENCE values before those, and the spread is their median absolute deviation, scaled to a
standard deviation of a normal distribution (1.4826 times: Rousseeuw and Croux, "Alternatives to the Median Absolute
Deviation", 1993). A level leaves the usual when it is farther from it, on the bad side, than SPREADS spreads and than
the least change that the number's `Bounds` count. From then on the usual stands still, so that it does not learn what
went wrong, until the level comes back; after FORGIVEN values the new level is the usual one.

Knows nothing of what the numbers are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

RECENT = 5
REFERENCE = 50
LEAST_REFERENCE = 20
"""So many values must be known before the recent ones: with fewer the spread is a guess."""
SPREADS = 4.0
TO_NORMAL = 1.4826
BACK = 0.7
"""A level is back when its distance is below this part of the bound: one that trembles at the bound stays away."""
FORGIVEN = 200
RENEWED = 5
"""The usual is computed again after so many new values."""

Point = tuple[int, float]
"""A step and the number's value there."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Which side is bad, and the least change that counts, however small the spread is: `least`, in the number's unit,
    and `relative`, a part of the usual."""

    bad: Literal["high", "low", "both"]
    least: float
    relative: float = 0.0


@dataclass(frozen=True, slots=True)
class Level:
    """Where a series stands. `usual` and `spread` are None while too few values are known. `since` is the step from
    which on the level is not usual; None if it is."""

    now: float
    usual: float | None = None
    spread: float | None = None
    since: int | None = None


@dataclass(frozen=True, slots=True)
class _Usual:
    """What was usual, and the distance at which a level leaves it."""

    value: float
    spread: float
    bound: float

    @classmethod
    def of(cls, values: Sequence[float], bounds: Bounds) -> _Usual:
        value = median(values)
        spread = TO_NORMAL * median([abs(each - value) for each in values])
        return cls(value, spread, max(SPREADS * spread, bounds.least, bounds.relative * abs(value)))

    def distance(self, level: float, bounds: Bounds) -> float:
        """On the bad side; not above 0 on the good one."""
        away = level - self.value
        return {"high": away, "low": -away, "both": abs(away)}[bounds.bad]


def level_of(points: Sequence[Point], bounds: Bounds) -> Level | None:
    """The level at the last point; None with fewer than RECENT points."""
    if len(points) < RECENT:
        return None
    values = [value for _, value in points]
    reference: deque[float] = deque(maxlen=REFERENCE)
    usual: _Usual | None = None
    since: int | None = None
    away = learned = 0
    for index in range(RECENT - 1, len(values)):
        now = median(values[index - RECENT + 1 : index + 1])
        if usual is not None:
            distance = usual.distance(now, bounds)
            if since is None and distance > usual.bound:
                since, away = _onset(points, index, usual, bounds), 0
            elif since is not None and (distance < BACK * usual.bound or away >= FORGIVEN):
                if away >= FORGIVEN:
                    reference.clear()
                    reference.extend(values[index - REFERENCE + 1 : index + 1])
                    usual = _Usual.of(reference, bounds)
                since = None
        if since is not None:
            away += 1
        elif index >= RECENT:
            reference.append(values[index - RECENT])
            learned += 1
            if len(reference) >= LEAST_REFERENCE and (usual is None or learned % RENEWED == 0):
                usual = _Usual.of(reference, bounds)
    level = median(values[-RECENT:])
    return Level(level) if usual is None else Level(level, usual.value, usual.spread, since)


def _onset(points: Sequence[Point], index: int, usual: _Usual, bounds: Bounds) -> int:
    """The step at which the values began to lie beyond the middle between the usual and the level at `index`."""
    level = median([value for _, value in points[index - RECENT + 1 : index + 1]])
    middle = usual.distance(level, bounds) / 2
    begun = index
    while begun > 0 and usual.distance(points[begun - 1][1], bounds) > middle:
        begun -= 1
    while begun < index and usual.distance(points[begun][1], bounds) <= middle:
        begun += 1
    return points[begun][0]
