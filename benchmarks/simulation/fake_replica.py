"""A fake replica with few places and few adapter slots: the null upstream as an engine that can be full.

At most `places` samples run at once. The others wait, and the one with the lowest `priority` is next, as in vLLM; with
`fair=0` the one that came first. It keeps the `slots` adapters that it used last; a sample of another one counts in
`loads`, and an adapter that leaves for it in `evictions`. A sample takes between 1 - `spread` and 1 + `spread` of the
delay. POST /control?places=10&slots=16&fair=0&spread=0.2 sets these, beside what the null upstream knows.
Usage: python -m benchmarks.simulation.fake_replica PORT
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import random
import re
import sys
from collections import OrderedDict
from urllib.parse import parse_qsl, urlsplit

import uvloop

from benchmarks.null_upstream import Upstream, http_answer, serve

_MODEL = re.compile(rb'"model": *"([^"]+)"')
_PRIORITY = re.compile(rb'"priority": *(-?\d+)')


class Replica(Upstream):
    def __init__(self) -> None:
        super().__init__()
        self._settings = {"places": 10_000.0, "slots": 10_000.0, "fair": 1.0, "spread": 0.0}
        self._mean_s = 0.0
        self._running = self._loads = self._evictions = 0
        self._numbers = itertools.count()
        self._queue: list[tuple[int, int, asyncio.Transport, bytes, bytes]] = []
        self._adapters: OrderedDict[bytes, None] = OrderedDict()

    def control(self, path: bytes) -> bytes:
        super().control(path)
        asked = {name: float(value) for name, value in parse_qsl(urlsplit(path.decode()).query)}
        self._settings |= {name: asked[name] for name in self._settings.keys() & asked}
        self._mean_s = asked.get("delay_ms", self._mean_s * 1e3) / 1e3
        counts = b'{"requests":%d,"waiting":%d,"loads":%d,"evictions":%d}'
        return http_answer(counts % (self.requests, len(self._queue), self._loads, self._evictions))

    def reply(self, transport: asyncio.Transport, path: bytes, body: bytes) -> None:
        if not path.startswith((b"/v1/completions", b"/generate")):
            super().reply(transport, path, body)
        elif self._running < self._settings["places"]:
            self._begin(transport, path, body)
        else:
            asked = _PRIORITY.search(body) if self._settings["fair"] else None
            priority = int(asked[1]) if asked else 0
            heapq.heappush(self._queue, (priority, next(self._numbers), transport, path, body))

    def _begin(self, transport: asyncio.Transport, path: bytes, body: bytes) -> None:
        self._running += 1
        if model := _MODEL.search(body):
            self._use(model[1])
        spread = self._settings["spread"]
        self.delay_s = random.uniform(1 - spread, 1 + spread) * self._mean_s
        super().reply(transport, path, body)

    def _use(self, adapter: bytes) -> None:
        if adapter not in self._adapters:
            self._loads += 1
            if len(self._adapters) >= self._settings["slots"]:
                self._adapters.popitem(last=False)
                self._evictions += 1
        self._adapters[adapter] = None
        self._adapters.move_to_end(adapter)

    def send_delayed(self, request: int) -> None:
        super().send_delayed(request)
        self._running -= 1
        if self._queue:
            _, _, transport, path, body = heapq.heappop(self._queue)
            self._begin(transport, path, body)


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1]), Replica()))
