"""Rows about new weights: seconds and bytes per second of an update from disk, over a gloo group and in shared memory,
beside reading the files; where the time in vLLM goes; and the gaps that an update makes in streams of tokens.

The tiny model runs on two vLLMs, a random Qwen3 of 0.6 billion parameters (float32, 2.4 GB) on one. Trainer and servers
share the cores. Samples run during all updates.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import statistics
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp
import torch
from safetensors.torch import load_file

from benchmarks.models import make_large
from benchmarks.series import quantile
from benchmarks.stage import Stage, rollout
from benchmarks.table import Row
from skyrl.base.tiny import model_path
from skyrl.weights.disk import CheckpointOnDisk
from skyrl.weights.group import TrainerGroup
from skyrl.weights.protocol import publish
from skyrl.weights.shared_memory import SharedMemory
from skyrl.weights.tensors import in_buckets
from skyrl.weights.workers import Workers

PROMPT = list(range(10, 42))
TIMEOUT_S = 300.0
UPDATES = ("disk", "gloo, float32", "gloo, bfloat16", "shared memory")
OPTIONS = {"generator.inference_engine.max_model_len": 1024}


@dataclass(frozen=True)
class Size:
    name: str
    engines: int
    streams: int
    """For each engine."""
    tokens: int
    """Of each stream; then it begins again."""
    rounds: int
    seconds: float
    """How long streams are watched without an update."""


TINY = Size("tiny", engines=2, streams=4, tokens=200, rounds=20, seconds=6.0)
LARGE = Size("0.6B", engines=1, streams=1, tokens=100, rounds=3, seconds=20.0)


class WatchedWorkers(Workers):
    """Adds up the seconds of the stages that the servers tell, those of the slowest server."""

    def __init__(self, workers: Workers) -> None:
        super().__init__(workers.urls, update_s=TIMEOUT_S)
        self.stages: dict[str, float] = {}

    async def post(self, path: str, *bodies: Any, **options: Any) -> dict[str, Any]:
        answers = await super().post(path, *bodies, **options)
        told = [answer.get("seconds") or {} for answer in answers.values() if isinstance(answer, dict)]
        for stage in {stage for each in told for stage in each}:
            longest = max(each.get(stage, 0.0) for each in told)
            self.stages[stage] = self.stages.get(stage, 0.0) + longest
        return answers


@contextlib.asynccontextmanager
async def streaming(urls: tuple[str, ...], size: Size) -> AsyncIterator[list[float]]:
    """Streams at each server. Gives the seconds between two chunks of a stream, over all streams, from the block's
    beginning on."""
    gaps: list[float] = []
    body = {
        "input_ids": PROMPT,
        "sampling_params": {"max_new_tokens": size.tokens, "ignore_eos": True, "temperature": 1.0},
        "stream": True,
    }

    async def stream(session: aiohttp.ClientSession, url: str) -> None:
        while True:
            async with session.post(f"{url}/generate", json=body) as answer:
                assert answer.status == 200, await answer.text()
                last = None
                async for line in answer.content:
                    if line.startswith(b"data: {"):
                        now = time.perf_counter()
                        if last is not None:
                            gaps.append(now - last)
                        last = now

    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), read_bufsize=2**22, timeout=timeout) as s:
        running = [asyncio.create_task(stream(s, url)) for url in urls for _ in range(size.streams)]
        try:
            while len(gaps) < 2 * len(running):
                await asyncio.sleep(0.05)
                for task in running:
                    if task.done():
                        task.result()
            gaps.clear()
            yield gaps
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)


async def _timed(work: Callable[[int], Coroutine[Any, Any, None]], rounds: int, pause_s: float) -> list[float]:
    """Seconds of each round."""
    found = []
    for number in range(rounds):
        began = time.perf_counter()
        await work(number)
        found.append(time.perf_counter() - began)
        await asyncio.sleep(pause_s)
    return found


def read_s(directory: Path) -> float:
    """Seconds to read the checkpoint's files; they are in the page cache, as after they were written."""
    buffer = bytearray(16 * 2**20)
    began = time.perf_counter()
    for file in directory.glob("*.safetensors"):
        with open(file, "rb", buffering=0) as stream:
            while stream.readinto(buffer):
                pass
    return time.perf_counter() - began


def _tensors(model: Path) -> dict[str, torch.Tensor]:
    files = model.glob("*.safetensors")
    return {name: tensor.float() for file in files for name, tensor in load_file(file).items()}


async def measure(size: Size, router: str, model: Path, directory: Path, rounds: int) -> dict[str, Any]:
    workers = WatchedWorkers(await Workers.behind(router))
    checkpoint = directory / "checkpoint"
    tensors = _tensors(model)
    writer = CheckpointOnDisk(workers, directory, pause=None)
    await writer.begin("0")
    for part in in_buckets(tensors.items()):
        await writer.send(part)
    assert writer._directory is not None
    shutil.copytree(writer._directory, checkpoint)
    await writer.abandon()

    async def nothing(_: int) -> None:
        await asyncio.sleep(size.seconds / rounds)

    async def pause(_: int) -> None:
        async with workers.paused("in_place"):
            pass

    async def from_disk(number: int) -> None:
        body = {"model_path": str(checkpoint), "weight_version": f"disk-{number}", "flush_cache": False}
        await workers.post("/update_weights_from_disk", body | {"stage_only": True})
        async with workers.paused("in_place"):
            await workers.post("/update_weights_from_disk", body)

    def over_gloo(dtype: torch.dtype) -> Callable[[int], Coroutine[Any, Any, None]]:
        async def update(number: int) -> None:
            medium = TrainerGroup(workers, timeout_s=TIMEOUT_S, dtype=dtype)
            await publish(medium, f"{dtype}-{number}", in_buckets(tensors.items()))

        return update

    memory = SharedMemory(workers)

    async def in_memory(number: int) -> None:
        await publish(memory, f"memory-{number}", in_buckets(tensors.items()))

    ways = {
        "none": nothing,
        "pause": pause,
        "disk": from_disk,
        "gloo, float32": over_gloo(torch.float32),
        "gloo, bfloat16": over_gloo(torch.bfloat16),
        "shared memory": in_memory,
    }
    found: dict[str, Any] = {
        "bytes": sum(tensor.nbytes for tensor in tensors.values()),
        "read_s": statistics.median(read_s(checkpoint) for _ in range(3)),
        "ways": {},
    }
    for name, work in ways.items():
        workers.stages.clear()
        async with streaming(workers.urls, size) as gaps:
            seconds = await _timed(work, rounds, 0.3)
        found["ways"][name] = {
            "s": statistics.median(seconds),
            "all_s": seconds,
            "stages_s": {stage: seconds / rounds for stage, seconds in workers.stages.items()},
            "gap_median_s": quantile(gaps, 0.5),
            "gap_p99_s": quantile(gaps, 0.99),
            "gap_max_s": max(gaps),
            "gaps": len(gaps),
        }
    return found


def _rows(size: Size, found: dict[str, Any]) -> list[Row]:
    ways, mib = found["ways"], found["bytes"] / 2**20
    rows = []
    for name in UPDATES:
        rate = mib / (2 if "bfloat16" in name else 1) / ways[name]["s"]
        stages = ", ".join(f"{stage} {seconds:.3f}" for stage, seconds in ways[name]["stages_s"].items())
        note = f"{rate:,.0f} MiB/s of {mib:,.0f} MiB; files: {mib / found['read_s']:,.0f} MiB/s; in vLLM, s: {stages}"
        what = f"s per update, {name}, {size.name} on {size.engines} (direct: reading the files)"
        rows.append(Row("weights", what, "s", ways[name]["s"], direct=found["read_s"], note=note))
    for name in ("pause", *UPDATES):
        way, none = ways[name], ways["none"]
        note = (
            f"median {1000 * way['gap_median_s']:.0f}, p99 {1000 * way['gap_p99_s']:.0f} ms of {way['gaps']} gaps; "
            f"without: {1000 * none['gap_median_s']:.0f}, {1000 * none['gap_p99_s']:.0f} ms"
        )
        what = f"longest gap in a stream, {name}, {size.name} on {size.engines} (direct: no update)"
        rows.append(Row("weights", what, "s", way["gap_max_s"], direct=none["gap_max_s"], note=note))
    return rows


def compare(stage: Stage) -> list[Row]:
    rows: list[Row] = []
    for size in (TINY, LARGE):
        with TemporaryDirectory() as name:
            directory, model = Path(name), model_path()
            if size is LARGE:
                model = directory / "model"
                make_large(model)
            rounds = max(2, size.rounds // 4) if stage.quick else size.rounds
            with rollout(directory / "plane", str(model), size.engines, OPTIONS) as router:
                found = asyncio.run(measure(size, router, model, directory, rounds))
        stage.raw.append({"row": "weights", "path": size.name} | found)
        rows += _rows(size, found)
    return rows
