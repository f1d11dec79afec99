"""Clients that sample as the Tinker SDK does, many in one process, on servers that share a database.

Each client has a session and a sampling session, of one of `tenants` tenants, and keeps some samples in flight. A
sample is submitted on one connection; one long poll per client tells which samples have ended, and their results are
fetched one by one. Each connection goes to a server chosen at random, and to another one when it breaks.

A window is measured as in `benchmarks.load`; `lost` counts samples that were accepted and brought no result.
Usage: python -m benchmarks.simulation.clients '{"urls": [...], ...}' (the fields of ClientsSpec); prints JSON.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import uvloop

from benchmarks import prompts
from benchmarks.checks import AnswerCheck
from benchmarks.connection import Connection
from benchmarks.processes import busy_seconds, tree_seconds
from benchmarks.samples import MODEL
from benchmarks.series import quantile

LONGEST_ANSWER_S = 45.0
"""An answer that takes longer is given up, as by the SDK."""
TICK_S = 0.1
PAUSE_S = 0.1
"""After a connection broke."""


@dataclass(frozen=True)
class ClientsSpec:
    """`groups` are the process ids whose CPU is measured, by a name. `heartbeat_s` is 0 for none. `pause_s` is the mean
    pause after a sample. The tenants of loads with other `names` are others."""

    urls: list[str]
    clients: int
    in_flight: int
    """Samples of each client."""
    seconds: float
    tenants: int = 1
    names: str = "simulated"
    pause_s: float = 0.0
    warm_up_s: float = 2.0
    heartbeat_s: float = 10.0
    groups: dict[str, list[int]] = field(default_factory=dict[str, list[int]])


class AnyServer:
    """A connection to one of several servers. After it broke, or after LONGEST_ANSWER_S, the next request goes to
    another one and counts in `moves`."""

    def __init__(self, urls: list[str], key: str, moves: Counter[str]) -> None:
        self._addresses = [(part.hostname or "", part.port or 80) for part in map(urlsplit, urls)]
        self._headers = (
            f"X-API-Key: {key}\r\nContent-Type: application/json\r\nAccept: application/x-protobuf\r\n".encode()
        )
        self._moves = moves
        self._move()

    def _move(self) -> None:
        self._connection = Connection(*random.choice(self._addresses), self._headers)

    async def post(self, path: str, body: bytes) -> tuple[int, bytes]:
        """Status and body of the answer. Repeats the request until a server answers."""
        while True:
            try:
                async with asyncio.timeout(LONGEST_ANSWER_S):
                    return await self._connection.post(f"/api/v1/{path}".encode(), body)
            except OSError as error:  # TimeoutError is one
                self._moves[type(error).__name__] += 1
                self._connection.close()
                await asyncio.sleep(PAUSE_S)
                self._move()

    async def json(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Raises RuntimeError for another status than 200."""
        status, answer = await self.post(path, json.dumps(body).encode())
        if status != 200:
            raise RuntimeError(f"{path}: {status} {answer[:300].decode(errors='replace')}")
        return json.loads(answer)


class Clients:
    """All clients of this process, and what they measured. `ends` counts the samples that ended in each TICK_S of the
    window."""

    def __init__(self, spec: ClientsSpec) -> None:
        self.spec = spec
        self.check = AnswerCheck(1, prompts.MAX_TOKENS)
        self.prompts = [json.dumps(prompts.prompt(n, prompts.PROMPT_TOKENS)).encode() for n in range(prompts.VARIANTS)]
        self.moves: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.accepted = self.delivered = self.refused = self.polls = 0
        self.stopping = self.measuring = False
        self.began = 0.0
        self.latencies: list[float] = []
        self.ends: Counter[int] = Counter()

    async def run(self) -> dict[str, Any]:
        spec = self.spec
        clients = [Client(self, number) for number in range(spec.clients)]
        for start in range(0, len(clients), 32):
            await asyncio.gather(*(client.open() for client in clients[start : start + 32]))
        print("open", flush=True)
        tasks = [task for client in clients for task in client.start()]
        await asyncio.sleep(spec.warm_up_s)
        before, polls, self.began = self._cpu(), self.polls, time.time()
        self.measuring = True
        await asyncio.sleep(spec.seconds)
        self.measuring, began, ended = False, self.began, time.time()
        after, polls = self._cpu(), self.polls - polls
        spent = {name: after[name] - before[name] for name in after}
        others_s = max(0.0, spent.pop("machine") - sum(spent.values()))
        self.stopping = True
        await asyncio.wait([task for client in clients for task in client.workers], timeout=LONGEST_ANSWER_S)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        done = len(self.latencies)
        return {
            "samples_per_s": done / (ended - began),
            "p50_ms": quantile(self.latencies, 0.5) * 1e3,
            "p99_ms": quantile(self.latencies, 0.99) * 1e3,
            "longest_ms": max(self.latencies, default=float("nan")) * 1e3,
            "cpu_ms": {name: seconds / max(1, done) * 1e3 for name, seconds in spent.items()},
            "other_cores": others_s / (ended - began),
            "polls_per_sample": polls / max(1, done),
            "window": [began, ended],
            "ends": [self.ends[tick] for tick in range(round((ended - began) / TICK_S))],
            "lost": self.accepted - self.delivered,
            "refused": self.refused,
            "moves": dict(self.moves),
            "errors": dict(self.errors),
        }

    def _cpu(self) -> dict[str, float]:
        measured = {name: sum(map(tree_seconds, pids)) for name, pids in self.spec.groups.items()}
        return measured | {"clients": time.process_time(), "machine": busy_seconds()}


class Client:
    """One session of one tenant."""

    def __init__(self, clients: Clients, number: int) -> None:
        self._all = clients
        self._key = f"tml-{clients.spec.names}-{number % clients.spec.tenants}"
        self._numbers = iter(range(10**9))
        self._waiting: dict[str, asyncio.Future[None]] = {}
        self._ended: dict[str, None] = {}
        """Ends that were told before the answer to the submission came."""
        self.workers: list[asyncio.Task[None]] = []

    def _connect(self) -> AnyServer:
        return AnyServer(self._all.spec.urls, self._key, self._all.moves)

    async def open(self) -> None:
        http = self._connect()
        session = {"sdk_version": "0.38.0", "tags": [], "user_metadata": {}, "type": "create_session"}
        self._session: str = (await http.json("create_session", session))["session_id"]
        sampler = {"session_id": self._session, "sampling_session_seq_id": 0, "base_model": MODEL}
        made = await http.json("create_sampling_session", sampler | {"type": "create_sampling_session"})
        self._sampler: str = made["sampling_session_id"]
        params = {"max_tokens": prompts.MAX_TOKENS, "seed": 1, "temperature": 1.0, "top_k": -1, "top_p": 1.0}
        prompt = {"chunks": [{"type": "encoded_text", "tokens": "PROMPT"}]}
        sample = {"num_samples": 1, "prompt": prompt, "sampling_params": params, "type": "sample"}
        text = json.dumps(sample | {"sampling_session_id": self._sampler, "seq_id": "NUMBER"}).replace("%", "%%")
        self._body = text.replace('"PROMPT"', "%s").replace('"NUMBER"', "%d").encode()

    def start(self) -> list[asyncio.Task[None]]:
        self.workers = [asyncio.create_task(self._work()) for _ in range(self._all.spec.in_flight)]
        return [asyncio.create_task(self._poll()), asyncio.create_task(self._beat()), *self.workers]

    async def _work(self) -> None:
        http, clients = self._connect(), self._all
        await asyncio.sleep(random.uniform(0, clients.spec.warm_up_s / 2))
        while not clients.stopping:
            began, number = time.perf_counter(), next(self._numbers)
            variant = number % prompts.VARIANTS
            status, answer = await http.post("asample", self._body % (clients.prompts[variant], number))
            if status != 200:
                clients.refused += 1
                await asyncio.sleep(PAUSE_S)
                continue
            clients.accepted += 1
            request_id: str = json.loads(answer)["request_id"]
            await self._end_of(request_id)
            status, answer = await http.post("retrieve_future", json.dumps({"request_id": request_id}).encode())
            fault = clients.check.problem(variant, answer) if status == 200 else f"retrieve_future {status}"
            if fault is not None:
                clients.errors[fault] += 1
                continue
            clients.delivered += 1
            if clients.measuring:
                clients.ends[int((time.time() - clients.began) / TICK_S)] += 1
                clients.latencies.append(time.perf_counter() - began)
            if clients.spec.pause_s and not clients.stopping:
                await asyncio.sleep(random.expovariate(1 / clients.spec.pause_s))

    async def _end_of(self, request_id: str) -> None:
        if request_id in self._ended:
            del self._ended[request_id]
            return
        self._waiting[request_id] = asyncio.get_running_loop().create_future()
        await self._waiting[request_id]

    async def _poll(self) -> None:
        http, cursor = self._connect(), 0
        target = {"type": "sampling_session", "sampling_session_id": self._sampler, "cloned_sampler_id": 0}
        while True:
            asked = json.dumps({"target": target, "prev_cursor": cursor, "retrieved_request_ids": []})
            status, answer = await http.post("retrieve_futures", asked.encode())
            self._all.polls += 1
            if status != 200:
                self._all.errors[f"retrieve_futures {status}"] += 1
                await asyncio.sleep(PAUSE_S)
                continue
            told = json.loads(answer)
            cursor = told["cursor"]
            for end in told["completions"]:
                if (waiter := self._waiting.pop(end["request_id"], None)) is not None:
                    if not waiter.done():
                        waiter.set_result(None)
                else:
                    self._ended[end["request_id"]] = None

    async def _beat(self) -> None:
        period_s, http = self._all.spec.heartbeat_s, self._connect()
        while period_s:
            await asyncio.sleep(random.uniform(0.5, 1.0) * period_s)
            await http.post("session_heartbeat", json.dumps({"session_id": self._session}).encode())


if __name__ == "__main__":
    print(json.dumps(uvloop.run(Clients(ClientsSpec(**json.loads(sys.argv[1]))).run())))
