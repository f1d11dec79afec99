"""A token bucket that refuses no request: a request that takes more tokens than there are gets a later turn.

Pure arithmetic; times are seconds of one clock.
"""

from __future__ import annotations


class TokenBucket:
    """Tokens come in at a rate, and the bucket holds at most a minute's worth. If a request takes more tokens than
    there are, the level falls below zero, and the request starts when enough tokens have come in. Requests start in the
    order of arrival. A request for more than a minute's worth starts when the bucket is full; later requests wait for
    the rest.

    The turn of a request is an income: the total of tokens that must have come in since the bucket began. So all turns
    come earlier when tokens are given back, and move with the rate when it changes.
    """

    def __init__(self, per_minute: int, now: float) -> None:
        self._per_minute = per_minute
        self._level = float(per_minute)
        self._income = 0.0
        self._updated_at = now

    def take(self, tokens: float, now: float) -> float:
        """Take tokens for a request. Returns its turn."""
        missing = self._missing(tokens, now)
        self._level -= tokens
        return self._income + missing

    def wait_s(self, tokens: float, now: float) -> float:
        """Seconds that a request for `tokens` would wait."""
        return self._seconds(self._missing(tokens, now))

    def left_s(self, turn: float, now: float) -> float:
        """Seconds until a turn, if no tokens are given back."""
        self._advance(now)
        return self._seconds(max(0.0, turn - self._income))

    def give_back(self, tokens: float, now: float) -> None:
        """Give back tokens that were taken and not used; a negative number of tokens takes more."""
        self._advance(now)
        self._come_in(tokens)

    def owe(self, seconds: float, now: float) -> float:
        """Lower the level so that it takes `seconds` to reach zero, unless it is lower already. Returns the turn after
        that time."""
        self._advance(now)
        tokens = seconds * self._per_minute / 60
        self._level = min(self._level, -tokens)
        return self._income + tokens

    def change_rate(self, per_minute: int, now: float) -> None:
        self._advance(now)
        self._per_minute = per_minute
        self._level = min(self._level, per_minute)

    def full(self, now: float) -> bool:
        """Whether the bucket holds a minute's worth, as at first."""
        self._advance(now)
        return self._level >= self._per_minute

    def _missing(self, tokens: float, now: float) -> float:
        self._advance(now)
        excess = max(0.0, tokens - self._per_minute)
        return max(0.0, tokens - self._level - excess)

    def _seconds(self, tokens: float) -> float:
        return tokens * 60 / self._per_minute

    def _advance(self, now: float) -> None:
        if now > self._updated_at:
            self._come_in((now - self._updated_at) * self._per_minute / 60)
            self._updated_at = now

    def _come_in(self, tokens: float) -> None:
        self._income += tokens
        self._level = min(self._level + tokens, self._per_minute)
