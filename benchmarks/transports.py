"""Compares HTTP clients for forwarding: skyrl's own, aiohttp and plain httpx, with the same requests to the same null
upstream.

Measures requests per second, and CPU seconds of the client's process per 1,000 requests.

Usage: python benchmarks/transports.py [--out FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import aiohttp
import httpx
import uvloop

from benchmarks.prompts import prompt
from skyrl.runtime.processes.ports import free_port
from skyrl.server.sampling.http import HttpTransport
from skyrl.server.sampling.transport import Answer

HEADERS = {"Content-Type": "application/json"}


class Client(Protocol):
    async def post(self, url: str, body: bytes, headers: dict[str, str], timeout_s: float) -> Answer: ...

    async def close(self) -> None: ...


class HttpxClient:
    """The same call with httpx, with an unlimited pool."""

    def __init__(self) -> None:
        self._client = httpx.AsyncClient(limits=httpx.Limits(), timeout=60, trust_env=False)

    async def post(self, url: str, body: bytes, headers: dict[str, str], timeout_s: float) -> Answer:
        response = await self._client.post(url, content=body, headers=headers)
        return Answer(response.status_code, "", response.content)

    async def close(self) -> None:
        await self._client.aclose()


class AiohttpClient:
    """The same call with aiohttp, with an unlimited pool."""

    def __init__(self) -> None:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), cookie_jar=aiohttp.DummyCookieJar(), read_bufsize=2**20
        )

    async def post(self, url: str, body: bytes, headers: dict[str, str], timeout_s: float) -> Answer:
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        async with self._session.post(url, data=body, headers=headers, timeout=timeout) as response:
            return Answer(response.status, response.content_type, await response.read())

    async def close(self) -> None:
        await self._session.close()


CLIENTS: dict[str, Callable[[], Client]] = {"httpx": HttpxClient, "aiohttp": AiohttpClient, "skyrl": HttpTransport}
RUNS = ((1, 500), (16, 1500), (64, 1500), (256, 1500))


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


async def measure(client: Client, url: str, concurrency: int, samples: int) -> tuple[float, float]:
    """Requests per second, and CPU seconds per 1,000 requests."""
    body = json.dumps({"model": "tiny", "prompt": prompt(0, 512), "n": 1, "max_tokens": 64}).encode()
    todo = iter(range(samples))

    async def worker() -> None:
        for _ in todo:
            answer = await client.post(url, body, HEADERS, 60.0)
            assert answer.status == 200

    began, used = time.perf_counter(), cpu_s()
    await asyncio.gather(*(worker() for _ in range(concurrency)))
    return samples / (time.perf_counter() - began), (cpu_s() - used) / samples * 1e3


async def compare(url: str) -> list[dict[str, Any]]:
    rows = []
    for concurrency, samples in RUNS:
        row: dict[str, Any] = {"concurrency": concurrency}
        for name, make in CLIENTS.items():
            client = make()
            await measure(client, url, concurrency, max(concurrency, samples // 5))
            rate, cost = await measure(client, url, concurrency, samples)
            row |= {f"{name}_per_s": round(rate, 1), f"{name}_cpu_s_per_1000": round(cost, 3)}
            await client.close()
        print(json.dumps(row), flush=True)
        rows.append(row)
    return rows


def run() -> list[dict[str, Any]]:
    port = free_port()
    upstream = subprocess.Popen([sys.executable, str(Path(__file__).with_name("null_upstream.py")), str(port)])
    try:
        time.sleep(1)
        return uvloop.run(compare(f"http://127.0.0.1:{port}/v1/completions"))
    finally:
        upstream.terminate()
        upstream.wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    out = parser.parse_args().out
    rows = run()
    if out is not None:
        out.write_text(json.dumps(rows, indent=1) + "\n")
