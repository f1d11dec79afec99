"""The other API processes of the database, as this one knows them, and what it tells them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable


class PeerNotifier:
    """`living` are the ids of the others; while there are none nothing is told. Words (ids of requests, of sampling
    sessions and of sessions) that one turn of the loop tells go to `send` together. One may be lost on the way, so
    everybody also looks by itself now and then."""

    def __init__(self) -> None:
        self.living: frozenset[str] = frozenset()
        self.send: Callable[[list[str]], None] | None = None
        self._turn: dict[str, None] = {}

    @property
    def alone(self) -> bool:
        return not self.living

    def notify(self, words: Iterable[str]) -> None:
        """These have ended or changed here."""
        if self.alone or self.send is None:
            return
        if not self._turn:
            asyncio.get_running_loop().call_soon(self._send_turn)
        self._turn.update(dict.fromkeys(words))

    def _send_turn(self) -> None:
        words, self._turn = list(self._turn), {}
        if self.send is not None and words:
            self.send(words)
