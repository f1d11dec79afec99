"""Who is next where several want the same: start-time fair queueing, by what has been done for each so far.

Pure bookkeeping, in whatever unit the caller counts work.
"""

from __future__ import annotations

from collections.abc import Iterable


class Shares:
    """What each party has had. Whoever has had least is next, and is charged for what it then gets.

    Between two parties that both always want something, what they get differs by at most the largest charge of each.
    """

    def __init__(self) -> None:
        self._had: dict[str, int] = {}
        self._floor = 0

    def compete(self, wanting: Iterable[str]) -> None:
        """`wanting` are the parties that have work now. A party that had none for a while gets no credit for that time:
        its count is raised to the smallest that a party with work had at the call before."""
        had = {party: max(self.had(party), self._floor) for party in wanting}
        away = {party: amount for party, amount in self._had.items() if party not in had and amount > self._floor}
        self._floor = min(had.values(), default=self._floor)
        self._had = away | had

    def had(self, party: str) -> int:
        return self._had.get(party, self._floor)

    def charge(self, party: str, cost: int) -> None:
        self._had[party] = self.had(party) + cost
