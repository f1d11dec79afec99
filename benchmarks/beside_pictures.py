"""Rows about pictures: how long a tenant's text samples of 8 tokens take, alone and while another tenant sends pictures
of 4 megapixels.

Once in front of a real vLLM with the tiny model that sees, and once in front of the null upstream: there the pictures
are checked, stored and forwarded, and the figures are those of skyrl alone. Text samples arrive by the clock, RATE per
second. Beside the pictures they are counted from the first picture until the last one has its answer.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from asyncio.subprocess import PIPE
from collections.abc import Awaitable, Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks.picture_load import DEADLINE_S, MODEL, TEXT, Tenant, text
from benchmarks.series import quantile
from benchmarks.stage import Stage, ready_server
from benchmarks.table import Row, Target
from skyrl.base.tiny import vision
from skyrl.cli.demo.server import DemoServer
from skyrl.runtime.processes.supervision import dies_with_parent

PICTURES, QUICK_PICTURES = 200, 40
IN_FLIGHT = (200, 16, 4)
"""Pictures in flight, one load after the other."""
RATE = 10.0
"""Text samples per second."""
ALONE_S, QUICK_ALONE_S = 20.0, 8.0
WARM_UP_S = 3.0
P99_MS = 50.0


async def _texts(tenant: Tenant, until: Awaitable[object]) -> tuple[list[float], int]:
    """The seconds of the samples that arrive before `until` ends, and how many samples failed."""
    ended = asyncio.ensure_future(until)
    seconds: list[float] = []
    failed = 0

    async def one(due: float) -> None:
        nonlocal failed
        try:
            await tenant.sample([text(TEXT)], 8)
        except RuntimeError:
            failed += 1
        else:
            seconds.append(time.perf_counter() - due)

    began, number = time.perf_counter(), 0
    async with asyncio.TaskGroup() as group:
        while not ended.done():
            due = began + number / RATE
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            group.create_task(one(due))
            number += 1
    await ended
    return seconds, failed


async def _beside(server: DemoServer, tenant: Tenant, count: int, in_flight: int) -> dict[str, Any]:
    """The samples of `tenant` while another tenant sends `count` pictures, `in_flight` at a time."""
    command = [sys.executable, "-m", "benchmarks.picture_load", server.url, str(count), str(in_flight)]
    load = await asyncio.create_subprocess_exec(*dies_with_parent(command), stdin=PIPE, stdout=PIPE)
    assert load.stdin is not None
    assert load.stdout is not None
    try:
        await load.stdout.readline()  # the pictures are drawn
        load.stdin.write(b"\n")
        told = asyncio.create_task(load.stdout.readline())
        found = await _texts(tenant, asyncio.wait([told], timeout=DEADLINE_S))
        sent = json.loads(told.result())
    finally:
        with suppress(ProcessLookupError):
            load.kill()
        await load.wait()
    return {"in_flight": in_flight, "pictures": sent, **_figures(found)}


async def _measure(server: DemoServer, count: int, in_flight: Sequence[int], alone_s: float) -> dict[str, Any]:
    async with Tenant(server.url, "tml-text") as tenant:
        await _texts(tenant, asyncio.sleep(WARM_UP_S))
        alone = _figures(await _texts(tenant, asyncio.sleep(alone_s)))
        return {"alone": alone, "beside": [await _beside(server, tenant, count, most) for most in in_flight]}


def _figures(found: tuple[list[float], int]) -> dict[str, float]:
    seconds, failed = found
    return {
        "p50_ms": quantile(seconds, 0.5) * 1e3,
        "p99_ms": quantile(seconds, 0.99) * 1e3,
        "max_ms": max(seconds, default=float("nan")) * 1e3,
        "samples": len(seconds),
        "errors": failed,
    }


@contextmanager
def _server(*flags: str) -> Generator[DemoServer]:
    """A server of the tiny model that sees."""
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory) / "model"
        model.mkdir()
        vision.make(model)
        names = ("--base-model", str(model), "--served-model-name", MODEL)
        with ready_server(*names, *flags) as server:
            yield server


def compare(stage: Stage) -> list[Row]:
    """ "direct" is a text sample alone on the same server."""
    null = ("--backend", "none", "--external-inference-url", stage.upstream.url)
    return [*_rows(stage, "null upstream", IN_FLIGHT[:1], *null), *_rows(stage, "vLLM", IN_FLIGHT)]


def _rows(stage: Stage, behind: str, in_flight: Sequence[int], *flags: str) -> list[Row]:
    count, alone_s = (QUICK_PICTURES, QUICK_ALONE_S) if stage.quick else (PICTURES, ALONE_S)
    with _server(*flags) as server:
        found = asyncio.run(_measure(server, count, in_flight, alone_s))
    stage.raw.append({"row": "beside-pictures", "path": behind} | found)
    rows: list[Row] = []
    for beside in found["beside"]:
        sent, alone = beside["pictures"], found["alone"]
        failed = int(alone["errors"] + beside["errors"] + sent["errors"])
        note = f"{count} pictures in {sent['seconds']:.1f} s, {beside['samples']} text samples meanwhile"
        note += f"; errors: {sent['first_error']}" if failed else ""
        what = f"{{}} of a text sample beside pictures, {beside['in_flight']} in flight; {behind}"
        p50, p99 = (what.format(name) for name in ("p50", "p99"))
        rows += [
            Row("beside-pictures", p50, "ms", beside["p50_ms"], None, alone["p50_ms"], failed),
            Row("beside-pictures", p99, "ms", beside["p99_ms"], Target(P99_MS), alone["p99_ms"], failed, note),
        ]
    return rows
