"""A token bucket whose takers never come back empty-handed: each is told when its turn is.

Pure arithmetic; times are seconds of one clock.
"""

from __future__ import annotations


class TokenBucket:
    """Tokens come in at a rate, and a minute's worth is kept at most. Whoever takes more than there is goes into debt,
    and starts when enough has come in, in the order of arrival. One that wants more than a minute's worth starts when
    the bucket is full, and leaves the rest as debt to those after it.

    Turns are told as income: the tokens that have come in since the beginning when the taker may start. So all who wait
    move up together when somebody gives back, and when the rate is changed.
    """

    def __init__(self, per_minute: int, now: float) -> None:
        self._per_minute = per_minute
        self._level = float(per_minute)
        self._income = 0.0
        self._at = now

    def take(self, tokens: float, now: float) -> float:
        """Take these; returns the income at which the taker may start."""
        missing = self._missing(tokens, now)
        self._level -= tokens
        return self._income + missing

    def wait_s(self, tokens: float, now: float) -> float:
        """How long a taker of so many would wait."""
        return self._seconds(self._missing(tokens, now))

    def left_s(self, turn: float, now: float) -> float:
        """Seconds until a turn, if nobody gives back."""
        self._advance(now)
        return self._seconds(max(0.0, turn - self._income))

    def give_back(self, tokens: float, now: float) -> None:
        """What was taken and not used; below zero, what was used and not taken."""
        self._advance(now)
        self._come_in(tokens)

    def owe(self, seconds: float, now: float) -> float:
        """Go into a debt of so long, unless it is longer already; returns the turn at its end."""
        self._advance(now)
        tokens = seconds * self._per_minute / 60
        self._level = min(self._level, -tokens)
        return self._income + tokens

    def change_rate(self, per_minute: int, now: float) -> None:
        self._advance(now)
        self._per_minute = per_minute
        self._level = min(self._level, per_minute)

    def full(self, now: float) -> bool:
        """Whether it is as if nobody had ever taken anything."""
        self._advance(now)
        return self._level >= self._per_minute

    def _missing(self, tokens: float, now: float) -> float:
        self._advance(now)
        debt = max(0.0, tokens - self._per_minute)
        return max(0.0, tokens - self._level - debt)

    def _seconds(self, tokens: float) -> float:
        return tokens * 60 / self._per_minute

    def _advance(self, now: float) -> None:
        if now > self._at:
            self._come_in((now - self._at) * self._per_minute / 60)
            self._at = now

    def _come_in(self, tokens: float) -> None:
        self._income += tokens
        self._level = min(self._level + tokens, self._per_minute)
