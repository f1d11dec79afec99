"""Tokens per second and preemptions by the number of samples that vLLM gets at a time: fixed numbers, and all at once.

Usage: python -m benchmarks.concurrency [--against COMMIT] [--rounds 2] [--quick] [--out FILE]

A real vLLM with the tiny model, whose cache holds some 20 short or 4 long sequences, runs behind a gateway; with
`--against` also a vLLM and a gateway of that commit. All get the same batches in turns, from an empty prefix cache:
more samples than fit, all offered at once. A sample ends when it draws one of some tokens, as answers of a model do:
nobody knows its length. For a fixed number the client itself sends only so many at a time, to the last build. Latencies
count from the batch's start, so they have the wait in the client, too.

Two runs' tokens/s differ by more than two rows, so the engine also counts (`scheduler_steps.py`): steps, the tokens
that they compute, and the sequences in them. The CPU milliseconds of a step, of a token and of a sequence are fitted to
all steps of the run, and `of best` is what a way samples in a modelled millisecond beside the best fixed number: the
median over batches, each against the same batch.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import re
import shutil
import subprocess
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product
from operator import truediv
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import httpx
import numpy as np

from benchmarks import machine, program, scheduler_steps
from benchmarks.picture_load import Tenant, text
from benchmarks.series import quantile
from benchmarks.stage import server_of
from benchmarks.table import aligned, number
from skyrl.base.config.loading import load_config
from skyrl.inference.vllm_command import vllm_spec
from skyrl.runtime.processes.ports import free_port
from skyrl.runtime.processes.supervision import dies_with_parent

KEY, MODEL = "bench", "tiny"
KINDS = ("short", "long", "mixed")
ALL_AT_ONCE = 10_000
FIXED = (4, 8, 16, 32, 64)
BACKEND = {
    "generator.inference_engine.max_model_len": 1024,
    "generator.inference_engine.max_num_seqs": 256,
    "generator.inference_engine.engine_init_kwargs": {
        "num_gpu_blocks_override": 65,
        "scheduler_cls": "scheduler_steps.Steps",
    },
}
"""64 blocks of 32 tokens."""
ENDS = [500, 501]
"""Tokens that end a sample. The tiny model draws each of its 512 tokens about equally often."""


@dataclass(frozen=True)
class Asked:
    prompt: list[int]
    max_tokens: int


def batch(kind: str, turn: int, part: float) -> list[Asked]:
    """`part`: of the usual number of samples."""
    rng = random.Random(f"{kind} {turn}")

    def asked(prompt: tuple[int, int], most: int) -> Asked:
        return Asked([rng.randrange(3, 500) for _ in range(rng.randint(*prompt))], most)

    short, long = {"short": (64, 0), "long": (0, 24), "mixed": (40, 10)}[kind]
    found = [asked((17, 31), 400) for _ in range(int(short * part))]
    found += [asked((301, 451), 200) for _ in range(int(long * part))]
    rng.shuffle(found)
    return found


class Side:
    """vLLM and a gateway of the checkout `root`."""

    def __init__(self, root: Path, stack: ExitStack) -> None:
        state = Path(stack.enter_context(TemporaryDirectory(prefix="skyrl-concurrency-")))
        self._steps = state / "steps"
        self._steps.touch()
        shutil.copy(scheduler_steps.__file__, state)
        config = load_config({"base_model": MODEL, "state_dir": state, "backend_config": BACKEND})
        spec = vllm_spec(config, free_port(), KEY, cuda=False)
        environment = os.environ | {"PYTHONPATH": f"{root}:{state}", scheduler_steps.FILE: str(self._steps)}
        log = stack.enter_context((state / "vllm.log").open("w"))
        self._vllm = subprocess.Popen(
            dies_with_parent(spec.argv), env=environment | dict(spec.env), cwd=root, stdout=log, stderr=log
        )
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

    def run(self, asked: Sequence[Asked], in_flight: int) -> tuple[dict[str, float], np.ndarray]:
        """The figures of one batch, of which so many samples are in flight at a time; and its steps: CPU seconds,
        tokens, sequences and preemptions of each."""
        self._post("reset_prefix_cache")
        before, at = self._metrics(), self._steps.stat().st_size
        seconds, latencies = asyncio.run(self._send(asked, in_flight))
        steps = np.loadtxt(self._steps.read_text()[at:].splitlines(), ndmin=2)
        steps[:-1, 0] = np.diff(steps[:, 0])
        sampled = self._metrics()["vllm:generation_tokens_total"] - before["vllm:generation_tokens_total"]
        figures = {
            "sampled": sampled,
            "steps": float(len(steps)),
            "computed": float(steps[:, 1].sum()),
            "sequences a step": float(steps[:, 2].mean()),
            "preemptions per 100": 100 * float(steps[:, 3].sum()) / len(asked),
            "tokens/s": sampled / seconds,
            "p50 s": quantile(latencies, 0.5),
            "p99 s": quantile(latencies, 0.99),
        }
        return figures, steps[:-1]  # the last one's CPU is not known

    def _post(self, path: str) -> None:
        headers = {"Authorization": f"Bearer {KEY}"}
        httpx.post(f"{self._url}/{path}", headers=headers, trust_env=False).raise_for_status()

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


def fitted(steps: np.ndarray) -> np.ndarray:
    """Milliseconds of CPU of a step, of a token that it computes and of a sequence in it, by least squares; without the
    hundredth of the steps that took the longest."""
    usual = steps[steps[:, 0] <= np.quantile(steps[:, 0], 0.99)]
    of = np.column_stack([np.ones(len(usual)), usual[:, 1:3]])
    return 1e3 * np.linalg.lstsq(of, usual[:, 0])[0]


def per_ms(figures: dict[str, float], costs: np.ndarray) -> float:
    """Tokens that are sampled in a millisecond, by the model."""
    steps = figures["steps"]
    return figures["sampled"] / float(costs @ [steps, figures["computed"], steps * figures["sequences a step"]])


def _arguments() -> argparse.Namespace:
    quick = "one round of smaller batches, two fixed numbers"
    parser = program.parser("concurrency", __doc__, out="bench/concurrency.json", quick=quick, against=True)
    parser.add_argument("--fixed", type=int, nargs="*", default=FIXED, metavar="N")
    parser.add_argument("--rounds", type=int, default=2)
    return parser.parse_args()


def main() -> None:
    options, rows = _arguments(), list[dict[str, object]]()
    fixed, rounds, part = ((8, 32), 1, 0.6) if options.quick else (options.fixed, options.rounds, 1.0)
    found: dict[tuple[str, str, int], list[dict[str, float]]] = defaultdict(list)
    steps: list[np.ndarray] = []
    with ExitStack() as stack:
        sides = {name: Side(root, stack) for name, root in program.builds(options.against, stack).items()}
        for side in sides.values():
            side.wait_ready()
            side.run(batch("short", -1, 0.2), ALL_AT_ONCE)  # warm up
        last = list(sides)[-1]
        ways = [(last, most) for most in fixed] + [(name, ALL_AT_ONCE) for name in sides]
        for kind, turn in product(KINDS, range(rounds)):
            for name, most in ways if turn % 2 == 0 else ways[::-1]:
                figures, of_batch = sides[name].run(batch(kind, turn, part), most)
                found[kind, name, most].append(figures)
                steps.append(of_batch)
    costs = fitted(np.concatenate(steps))
    for kind in KINDS:
        rates = {way: [per_ms(each, costs) for each in found[kind, *way]] for way in ways}
        for name, most in ways:
            figures = {key: median(each[key] for each in found[kind, name, most]) for key in found[kind, name, most][0]}
            beside = (median(map(truediv, rates[name, most], rates[last, other])) for other in fixed)
            what = f"{name}, all at once" if most == ALL_AT_ONCE else f"fixed, {most}"
            rows.append({"load": kind, "admitted": what, **figures, "of best": min(beside)})
    cells = [[number(each) if isinstance(each, float) else str(each) for each in row.values()] for row in rows]
    print(aligned([list(rows[0]), *cells]))
    print("CPU ms of a step, a token, a sequence:", *(f"{each:.3f}" for each in costs))
    program.write(options.out, {"facts": machine.facts(), "costs": costs.tolist(), "rows": rows})


if __name__ == "__main__":
    main()
