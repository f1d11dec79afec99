"""Fair shares: which of several parties is next, by the work done for each party so far (fair queueing).

Pure bookkeeping. The caller chooses the unit of work.
"""

from __future__ import annotations

from collections.abc import Iterable


class Shares:
    """The amount of work done for each party.

    If the party with the smallest amount is always next, the amounts of two parties that both have work all the time
    differ by at most the largest charge of each.
    """

    def __init__(self) -> None:
        self._amounts: dict[str, int] = {}
        self._floor = 0

    def compete(self, parties: Iterable[str]) -> None:
        """`parties` have work now.

        A party that had no work for a while gets no credit for that time: its amount is raised to the floor, which is
        the smallest amount of a party that had work at the previous call.
        """
        competing = {party: max(self.amount(party), self._floor) for party in parties}
        idle = {
            party: amount for party, amount in self._amounts.items() if party not in competing and amount > self._floor
        }
        self._floor = min(competing.values(), default=self._floor)
        self._amounts = idle | competing

    def amount(self, party: str) -> int:
        return self._amounts.get(party, self._floor)

    def charge(self, party: str, cost: int) -> None:
        self._amounts[party] = self.amount(party) + cost
