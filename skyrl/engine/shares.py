"""Fair shares: which of several parties is next, by the work that was done for each so far (start-time fair queueing).

Pure bookkeeping. The caller chooses the unit of work.
"""

from __future__ import annotations

from collections.abc import Iterable


class Shares:
    """The work that each party has had. The party that has had least is next, and is charged for what it then gets.

    While two parties both have work all the time, their shares differ by at most the largest charge of each.
    """

    def __init__(self) -> None:
        self._had: dict[str, int] = {}
        self._floor = 0

    def compete(self, wanting: Iterable[str]) -> None:
        """`wanting` are the parties that have work now.

        A party that had no work for a while gets no credit for that time: its count is raised to the floor, which is
        the smallest count of a party that had work at the previous call.
        """
        had = {party: max(self.had(party), self._floor) for party in wanting}
        away = {party: amount for party, amount in self._had.items() if party not in had and amount > self._floor}
        self._floor = min(had.values(), default=self._floor)
        self._had = away | had

    def had(self, party: str) -> int:
        return self._had.get(party, self._floor)

    def charge(self, party: str, cost: int) -> None:
        self._had[party] = self.had(party) + cost
