"""Which HTTP client forwards: aiohttp (what skyrl uses) and plain httpx, same requests, same null upstream.

Usage: python benchmarks/transports.py [--out FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import uvloop
from load import prompt

from skyrl.inference.placement import free_port
from skyrl.sampling.transport import AiohttpTransport, Answer

HEADERS = {"Content-Type": "application/json"}


class HttpxTransport:
    """The same calls on plain httpx, with an unlimited pool."""

    def __init__(self) -> None:
        self._client = httpx.AsyncClient(limits=httpx.Limits(), timeout=60, trust_env=False)

    async def post(self, url: str, body: bytes, headers: dict[str, str], timeout_s: float) -> Answer:
        response = await self._client.post(url, content=body, headers=headers)
        return Answer(response.status_code, "", response.content)

    async def close(self) -> None:
        await self._client.aclose()


async def measure(transport: AiohttpTransport | HttpxTransport, url: str, concurrency: int, samples: int) -> float:
    """Requests per second."""
    body = json.dumps({"model": "tiny", "prompt": prompt(0, 512), "n": 1, "max_tokens": 64}).encode()
    todo = iter(range(samples))

    async def worker() -> None:
        for _ in todo:
            answer = await transport.post(url, body, HEADERS, 60.0)
            assert answer.status == 200

    began = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(concurrency)))
    return samples / (time.perf_counter() - began)


async def compare(url: str) -> list[dict[str, Any]]:
    rows = []
    for concurrency, samples in ((1, 300), (16, 1000), (64, 1000), (256, 1000)):
        row: dict[str, Any] = {"concurrency": concurrency}
        for name, make in (("httpx", HttpxTransport), ("aiohttp", AiohttpTransport)):
            transport = make()
            await measure(transport, url, concurrency, max(concurrency, samples // 5))
            row[name] = round(await measure(transport, url, concurrency, samples), 1)
            await transport.close()
        row["ratio"] = round(row["aiohttp"] / row["httpx"], 1)
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
    found = run()
    if out is not None:
        out.write_text(json.dumps(found, indent=1) + "\n")
