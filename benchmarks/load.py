"""A closed-loop load over raw HTTP/1.1: C connections, each with one sample in flight, until so many are done."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

HEADERS = b"Host: bench\r\nX-API-Key: tml-bench\r\nContent-Type: application/json\r\nAccept: application/x-protobuf\r\n"


class Connection:
    """One keep-alive connection."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def post(self, path: str, body: bytes) -> tuple[int, bytes]:
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port, limit=2**24)
        reader, writer = self._streams
        writer.write(b"POST %s HTTP/1.1\r\n%sContent-Length: %d\r\n\r\n" % (path.encode(), HEADERS, len(body)) + body)
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        length = int(head.split(b"content-length:", 1)[1].split(b"\r\n", 1)[0])
        return int(head[9:12]), await reader.readexactly(length)

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()


@dataclass(frozen=True)
class Load:
    """What a run showed. Seconds; `cpu_s` is the server's, user and system."""

    concurrency: int
    samples: int
    wall_s: float
    latencies: list[float]
    cpu_s: float

    def row(self) -> dict[str, float]:
        return {
            "concurrency": self.concurrency,
            "samples": self.samples,
            "samples_per_s": round(self.samples / self.wall_s, 1),
            "p50_ms": round(float(np.quantile(self.latencies, 0.5)) * 1e3, 2),
            "p99_ms": round(float(np.quantile(self.latencies, 0.99)) * 1e3, 2),
            "server_cpu_s_per_1000": round(self.cpu_s / self.samples * 1e3, 3),
        }


def cpu_seconds(pid: int) -> float:
    """User and system CPU time of one process (Linux)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / 100


async def run_load(
    port: int, concurrency: int, samples: int, pid: int, one: Callable[[Connection, int], Awaitable[None]]
) -> Load:
    """`one(connection, index)` does one sample; `samples` of them are timed after a tenth as many to warm up."""
    connections = [Connection(port) for _ in range(concurrency)]
    latencies: list[float] = []

    async def work(indices: range, keep: bool) -> None:
        todo = iter(indices)

        async def worker(connection: Connection) -> None:
            for index in todo:
                began = time.perf_counter()
                await one(connection, index)
                if keep:
                    latencies.append(time.perf_counter() - began)

        await asyncio.gather(*(worker(connection) for connection in connections))

    warm_up = max(concurrency, samples // 10)
    await work(range(warm_up), keep=False)
    cpu, began = cpu_seconds(pid), time.perf_counter()
    await work(range(warm_up, warm_up + samples), keep=True)
    load = Load(concurrency, samples, time.perf_counter() - began, latencies, cpu_seconds(pid) - cpu)
    for connection in connections:
        connection.close()
    return load


def prompt(index: int, tokens: int) -> list[int]:
    return [3 + (index * 31 + position) % 400 for position in range(tokens)]


async def direct_sample(connection: Connection, index: int) -> None:
    body = {"model": "tiny", "prompt": prompt(index, 512), "n": 1, "max_tokens": 64, "logprobs": 0}
    status, _ = await connection.post("/v1/completions", json.dumps(body).encode())
    assert status == 200


class TinkerSamples:
    """asample and retrieve_future on one sampling session."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._session = ""
        self._base = 0

    async def open(self, base_model: str) -> None:
        setup = Connection(self._port)
        _, answer = await setup.post("/api/v1/create_session", b"{}")
        wanted = {
            "session_id": json.loads(answer)["session_id"],
            "sampling_session_seq_id": 0,
            "base_model": base_model,
        }
        _, answer = await setup.post("/api/v1/create_sampling_session", json.dumps(wanted).encode())
        self._session = json.loads(answer)["sampling_session_id"]
        setup.close()

    def next_run(self) -> None:
        """A fresh range of sequence numbers: a repeated one would be answered from memory."""
        self._base += 1_000_000

    async def sample(self, connection: Connection, index: int) -> None:
        body = {
            "sampling_session_id": self._session,
            "seq_id": self._base + index,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": prompt(index, 512)}]},
            "sampling_params": {"max_tokens": 64},
        }
        status, answer = await connection.post("/api/v1/asample", json.dumps(body).encode())
        assert status == 200, answer
        wait = json.dumps({"request_id": json.loads(answer)["request_id"]}).encode()
        status = 408
        while status == 408:
            status, answer = await connection.post("/api/v1/retrieve_future", wait)
        assert status == 200, answer
