"""How long a scrape of `/metrics` takes while samples are forwarded, by the number of samples in flight.

Usage: python -m benchmarks.scrape

With 64 in flight the process is full, and a scrape waits for its turn as any request does.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from statistics import median, quantiles
from urllib.parse import urlsplit

from benchmarks.samples import LoadSpec, TinkerSamples
from benchmarks.stage import NullUpstream, gateway

IN_FLIGHT = (0, 4, 16, 64)
SECONDS = 12.0
EVERY_S = 0.25


def scrapes_ms(url: str, seconds: float) -> list[float]:
    """Milliseconds from a request until its whole answer has arrived, each on a connection of its own."""
    taken: list[float] = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        began = time.perf_counter()
        connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=10)
        connection.request("GET", "/metrics", headers={"X-API-Key": "tml-bench"})
        answer = connection.getresponse()
        body = answer.read()
        if answer.status != 200 or b"skyrl_samples_total" not in body:
            raise RuntimeError(f"/metrics {answer.status}: {body[:200]!r}")
        connection.close()
        taken.append((time.perf_counter() - began) * 1e3)
        time.sleep(EVERY_S)
    return taken


async def row(url: str, in_flight: int, scraper: ProcessPoolExecutor) -> dict[str, float]:
    samples = TinkerSamples(LoadSpec(url, "tinker", max(1, in_flight), seconds=0))
    await samples.open()
    scraping = asyncio.get_running_loop().run_in_executor(scraper, scrapes_ms, url, SECONDS)
    done = 0
    began = time.monotonic()

    async def worker() -> None:
        nonlocal done
        connection = samples.connect()
        while not scraping.done():
            done += 1
            if (problem := await samples.sample(connection, done)) is not None:
                raise RuntimeError(problem)
        connection.close()

    await asyncio.gather(scraping, *(worker() for _ in range(in_flight)))
    taken = scraping.result()
    return {
        "in_flight": in_flight,
        "samples_per_s": round(done / (time.monotonic() - began)),
        "p50_ms": round(median(taken), 1),
        "p95_ms": round(quantiles(taken, n=20)[-1], 1),
    }


async def measure(url: str) -> None:
    with ProcessPoolExecutor(1, get_context("spawn")) as scraper:
        for in_flight in IN_FLIGHT:
            print(json.dumps(await row(url, in_flight, scraper)), flush=True)


def main() -> None:
    with NullUpstream() as upstream, gateway(upstream.url) as server:
        asyncio.run(measure(server.url))


if __name__ == "__main__":
    main()
