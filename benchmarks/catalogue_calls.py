"""The calls of `benchmarks.catalogue`: those of one tenant that reads its catalogue, and samples beside them.

Knows the HTTP routes and a path of `catalogue_rows.py`. Times are in ms.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from benchmarks.connection import Connection
from benchmarks.samples import LoadSpec, TinkerSamples
from benchmarks.series import quantile

IN_FLIGHT = 8
LEAST = 50
"""A second with fewer samples has no p99 of its own."""
RUN = "s00000x4:train:0"
"""The run of the tenant's active session."""
PATH = f"tinker://{RUN}/sampler_weights/step-0007"
GETS = {
    "list checkpoints": "/api/v1/checkpoints?limit=20",
    "list checkpoints, also published ones": "/api/v1/checkpoints?limit=20&access_scope=accessible",
    "list sessions": "/api/v1/sessions?limit=20",
    "list runs": "/api/v1/training_runs?limit=20",
    "list runs of a project": "/api/v1/training_runs?limit=20&project_id=default",
    "checkpoints of a run": f"/api/v1/training_runs/{RUN}/checkpoints",
    "status page": "/ui/api/state",
    "status page, server": "/ui/api/box",
}
_PUBLISHED = {"limit": 20, "owner": {"type": "accessible"}}
POSTS = {
    "search checkpoints": ("/api/v1/checkpoints/search", {"limit": 20}),
    "search checkpoints, also published ones": ("/api/v1/checkpoints/search", _PUBLISHED),
    "search sessions": ("/api/v1/sessions/search", {"limit": 20}),
    "resolve a path": ("/api/v1/weights_info", {"tinker_path": PATH}),
}
CLIENT = "make a sampling client"
READS = ": reads"
Call = Callable[[], Awaitable[tuple[int, bytes]]]


def _calls(connection: Connection, session_id: str) -> dict[str, Call]:
    made: dict[str, Call] = {}
    for name, path in GETS.items():
        made[name] = lambda path=path: connection.get(path.encode())
    for name, (path, body) in POSTS.items():
        made[name] = lambda path=path, body=body: connection.post(path.encode(), json.dumps(body).encode())
    numbers = iter(range(1, 10**6))

    def sampling_client() -> Awaitable[tuple[int, bytes]]:
        named = {"type": "create_sampling_session", "session_id": session_id, "model_path": PATH}
        body = named | {"sampling_session_seq_id": next(numbers)}
        return connection.post(b"/api/v1/create_sampling_session", json.dumps(body).encode())

    return made | {CLIENT: sampling_client}


async def calls(servers: Mapping[str, tuple[str, int]], rounds: int) -> dict[str, dict[str, list[float]]]:
    """By server and call, the times in rounds in which all servers and calls take turns; as `READS` after the call's
    name, how often the API process read from files and sockets meanwhile. `servers`: the URL of each, and its API's
    process. Raises RuntimeError for a call that fails."""
    found: dict[str, dict[str, list[float]]] = {server: defaultdict(list) for server in servers}
    made: dict[str, dict[str, Call]] = {}
    connections: list[Connection] = []
    for server, (url, _) in servers.items():
        samples = TinkerSamples(LoadSpec(url, "tinker", 1, 0.0))
        await samples.open()
        connections.append(samples.connect())
        made[server] = _calls(connections[-1], samples.session)
    for turn in range(rounds):
        for name in (*GETS, *POSTS, CLIENT):
            for server in sorted(servers, reverse=turn % 2 == 1):
                pid = servers[server][1]
                reads, began = _reads(pid), time.perf_counter()
                status, answer = await made[server][name]()
                found[server][name].append(1e3 * (time.perf_counter() - began))
                found[server][name + READS].append(_reads(pid) - reads)
                if status != 200:
                    raise RuntimeError(f"{name}: {status} {answer[:300]!r}")
    for connection in connections:
        connection.close()
    return found


def _reads(pid: int) -> int:
    """How often the process has read, as Linux counts."""
    return int(Path(f"/proc/{pid}/io").read_text().split("syscr: ")[1].split()[0])


async def sample(url: str, seconds: float) -> dict[str, float]:
    """Sample from the base model with IN_FLIGHT samples in flight. The first second warms up."""
    samples = TinkerSamples(LoadSpec(url, "tinker", IN_FLIGHT, 0.0))
    await samples.open()
    numbers, began, ended = iter(range(1, 10**9)), time.perf_counter(), list[tuple[int, float]]()

    async def worker() -> None:
        connection = samples.connect()
        while (start := time.perf_counter()) < began + seconds + 1:
            if (problem := await samples.sample(connection, next(numbers))) is not None:
                raise RuntimeError(problem)
            now = time.perf_counter()
            ended.append((int(now - began), 1e3 * (now - start)))
        connection.close()

    await asyncio.gather(*(worker() for _ in range(IN_FLIGHT)))
    by_second: dict[int, list[float]] = {}
    for second, took in ended:
        if second:
            by_second.setdefault(second, []).append(took)
    every = [took for each in by_second.values() for took in each]
    worst = max((quantile(each, 0.99) for each in by_second.values() if len(each) >= LEAST), default=float("nan"))
    return {"p50": quantile(every, 0.5), "p99": quantile(every, 0.99), "p99 of the worst second": worst}
