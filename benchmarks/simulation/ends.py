"""The long polls of an API process, answered as by `skyrl.storage.futures.completion_feed`.

A read of new ends serves all polls of the process. While other processes live, each poll asks for a read, because a
notice may be late. Reads are READ_EVERY_S apart.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.simulation.events import Activity, Lock, Signal
from benchmarks.simulation.services import Cost
from skyrl.storage.futures.completion_feed import READ_EVERY_S, SAFETY_READ_S

if TYPE_CHECKING:
    from benchmarks.simulation.api import Api
    from benchmarks.simulation.parts import Sample
    from benchmarks.simulation.tenants import Client


class Ends:
    """`stored` are the ends in the table that no read of this process has found, for clients that poll here."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self.stored: list[Sample] = []
        self._unread = True
        self._reading = Lock(api.cluster.clock)
        self._read_at = -1.0
        self._rows_read = 0
        self._found: dict[Client, list[Sample]] = {}
        self._changed: dict[Client, Signal] = {}

    def ended(self, client: Client) -> None:
        """This process has learned that a sample of this client has ended."""
        self._unread = True
        self._wake(client)

    def _wake(self, client: Client) -> None:
        if (changed := self._changed.pop(client, None)) is not None:
            changed.set()

    def poll(self, client: Client) -> Activity:
        """One poll; its value is the ends that it tells."""
        api, cluster = self._api, self._api.cluster
        half = Cost(cluster.services.poll.base / 2)
        yield from api.use(half)
        if len(cluster.living) > 1:
            self._unread = True
        while True:
            changed = self._changed.setdefault(client, Signal())
            yield from self._read()
            if found := self._found.pop(client, None):
                yield from api.use(half)
                return found
            if not changed.is_set:
                cluster.clock.at(cluster.clock.now + SAFETY_READ_S, lambda c=changed: self._look_again(client, c))
                yield changed

    def _look_again(self, client: Client, changed: Signal) -> None:
        if not changed.is_set:
            self._unread |= len(self._api.cluster.living) > 1
            self._wake(client)

    def _read(self) -> Activity:
        api, cluster = self._api, self._api.cluster
        yield self._reading.take()
        if self._unread:
            yield max(0.0, self._read_at + READ_EVERY_S - cluster.clock.now)
            self._unread = False
            found, self.stored = self.stored, []
            rows, self._rows_read = cluster.settled - self._rows_read, cluster.settled
            yield from api.read(cluster.services.read_ends_api, cluster.services.read_ends_db, rows)
            self._read_at = cluster.clock.now
            for sample in found:
                self._found.setdefault(sample.client, []).append(sample)
                self._wake(sample.client)
        self._reading.give_back()
