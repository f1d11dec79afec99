"""Tokens per second and preemptions by the number of samples that vLLM gets at a time: fixed numbers, and all at once.

Usage: python -m benchmarks.concurrency [--against COMMIT] [--rounds 2] [--quick] [--out FILE]

A real vLLM with the tiny model, whose cache holds some 20 short or 4 long sequences, runs behind a gateway; with
`--against` also a vLLM and a gateway of that commit. Both get the same batches in turns: more samples than fit, all
offered at once. A sample ends when it draws one of some tokens, as answers of a model do: nobody knows its length. For
a fixed number the client itself sends only so many at a time, to the build of `--against`. Latencies count from the
batch's start, so they have the wait in the client, too. CPU seconds are those of vLLM and of the gateway.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import re
import subprocess
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import httpx
import psutil

from benchmarks import machine, program
from benchmarks.picture_load import Tenant, text
from benchmarks.processes import cpu_seconds, parts_of
from benchmarks.series import quantile
from benchmarks.stage import server_of
from benchmarks.table import aligned, number
from skyrl.base.config.loading import load_config
from skyrl.inference.vllm_command import vllm_spec
from skyrl.runtime.processes.ports import free_port
from skyrl.runtime.processes.supervision import dies_with_parent

KEY, MODEL = "bench", "tiny"
ALL_AT_ONCE = 10_000
FIXED = (4, 8, 16, 32, 64)
BACKEND = {
    "generator.inference_engine.max_model_len": 1024,
    "generator.inference_engine.max_num_seqs": 256,
    "generator.inference_engine.engine_init_kwargs": {"num_gpu_blocks_override": 65},
}
"""64 blocks of 32 tokens."""
ENDS = [500, 501]
"""Tokens that end a sample. The tiny model draws each of its 512 tokens about equally often."""


@dataclass(frozen=True)
class Asked:
    prompt: list[int]
    max_tokens: int


def batch(kind: str, turn: int, first: int, part: float) -> list[Asked]:
    """`first`: the first token of all prompts, so that the prefix cache has none of them. `part`: of the usual number
    of samples."""
    rng = random.Random(f"{kind} {turn}")

    def asked(prompt: tuple[int, int], most: int) -> Asked:
        return Asked([first, *(rng.randrange(3, 500) for _ in range(rng.randint(*prompt)))], most)

    short, long = {"short": (64, 0), "long": (0, 24), "mixed": (40, 10)}[kind]
    found = [asked((16, 30), 400) for _ in range(int(short * part))]
    found += [asked((300, 450), 200) for _ in range(int(long * part))]
    rng.shuffle(found)
    return found


class Side:
    """vLLM and a gateway of the checkout `root`."""

    def __init__(self, root: Path, stack: ExitStack) -> None:
        state = Path(stack.enter_context(TemporaryDirectory(prefix="skyrl-concurrency-")))
        config = load_config({"base_model": MODEL, "state_dir": state, "backend_config": BACKEND})
        spec = vllm_spec(config, free_port(), KEY, cuda=False)
        environment = os.environ | {"PYTHONPATH": str(root)} | dict(spec.env)
        log = stack.enter_context((state / "vllm.log").open("w"))
        self._vllm = subprocess.Popen(dies_with_parent(spec.argv), env=environment, cwd=root, stdout=log, stderr=log)
        stack.callback(self._vllm.wait)
        stack.callback(self._vllm.terminate)
        self._url = spec.url
        flags = ("--backend", "none", "--base-model", MODEL, "--external-inference-url", spec.url)
        of_vllm = {"external_inference_priority": True, "external_inference_api_key": KEY}
        self._gateway = server_of(stack, *flags, root=root, **of_vllm)

    def wait_ready(self) -> None:
        end = time.monotonic() + 400
        while not self._metrics():
            assert time.monotonic() < end, "vLLM does not start"
            time.sleep(0.5)
        self._gateway.wait_api()
        self._pids = [parts_of(self._gateway.pid)["api"], self._vllm.pid]
        self._pids += [child.pid for child in psutil.Process(self._vllm.pid).children(recursive=True)]

    def _metrics(self) -> dict[str, float]:
        """The sums of vLLM's counters; empty while vLLM does not answer."""
        try:
            answer = httpx.get(f"{self._url}/metrics", headers={"Authorization": f"Bearer {KEY}"}, trust_env=False)
        except httpx.TransportError:
            return {}
        found: dict[str, float] = defaultdict(float)
        for name, value in re.findall(r"^(vllm:\w+_total)\{[^}]*\} (\S+)$", answer.text, re.MULTILINE):
            found[name] += float(value)
        return found

    def run(self, asked: Sequence[Asked], in_flight: int) -> dict[str, float]:
        """The figures of one batch, of which so many samples are in flight at a time."""
        cpu_s, before = sum(map(cpu_seconds, self._pids)), self._metrics()
        seconds, latencies = asyncio.run(self._send(asked, in_flight))
        after = self._metrics()
        spent = {name: after[name] - before[name] for name in after}
        sampled = spent["vllm:generation_tokens_total"]
        return {
            "tokens/s": sampled / seconds,
            "preemptions per 100": 100 * spent["vllm:num_preemptions_total"] / len(asked),
            "p50 s": quantile(latencies, 0.5),
            "p99 s": quantile(latencies, 0.99),
            "CPU s per 1,000 tokens": 1e3 * (sum(map(cpu_seconds, self._pids)) - cpu_s) / sampled,
        }

    async def _send(self, asked: Sequence[Asked], in_flight: int) -> tuple[float, list[float]]:
        turns, latencies = asyncio.Semaphore(in_flight), list[float]()
        async with Tenant(self._gateway.url, "tml-concurrency", MODEL) as tenant:
            began = time.perf_counter()

            async def one(seed: int, each: Asked) -> None:
                async with turns:
                    await tenant.sample([text(each.prompt)], each.max_tokens, ENDS, seed)
                latencies.append(time.perf_counter() - began)

            async with asyncio.TaskGroup() as group:
                for seed, each in enumerate(asked):
                    group.create_task(one(seed, each))
            return time.perf_counter() - began, latencies


def _arguments() -> argparse.Namespace:
    quick = "one round of smaller batches, two fixed numbers"
    parser = program.parser("concurrency", __doc__, out="bench/concurrency.json", quick=quick, against=True)
    parser.add_argument("--fixed", type=int, nargs="*", default=FIXED, metavar="N")
    parser.add_argument("--rounds", type=int, default=2)
    return parser.parse_args()


def main() -> None:
    options, rows = _arguments(), list[dict[str, object]]()
    fixed, rounds, part = ((8, 32), 1, 0.6) if options.quick else (options.fixed, options.rounds, 1.0)
    with ExitStack() as stack:
        sides = {name: Side(root, stack) for name, root in program.builds(options.against, stack).items()}
        for side in sides.values():
            side.wait_ready()
            side.run(batch("short", -1, 3, 0.2), ALL_AT_ONCE)  # warm up
        last = list(sides)[-1]
        settings = [(last, most) for most in fixed] + [(name, ALL_AT_ONCE) for name in sides]
        for kind in ("short", "long", "mixed"):
            found: dict[tuple[str, int], list[dict[str, float]]] = defaultdict(list)
            for turn in range(rounds):
                for name, most in settings if turn % 2 == 0 else settings[::-1]:
                    asked = batch(kind, turn, 3 + settings.index((name, most)), part)
                    found[name, most].append(sides[name].run(asked, most))
            for name, most in settings:
                figures = {key: median(each[key] for each in found[name, most]) for key in found[name, most][0]}
                what = f"{name}, all at once" if most == ALL_AT_ONCE else f"fixed, {most}"
                rows.append({"load": kind, "admitted": what, **figures})
                print(rows[-1], flush=True)
    cells = [[number(each) if isinstance(each, float) else str(each) for each in row.values()] for row in rows]
    print(aligned([list(rows[0]), *cells]))
    program.write(options.out, {"facts": machine.facts(), "rows": rows})


if __name__ == "__main__":
    main()
