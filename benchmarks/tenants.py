"""Tenants' RL, one after the other and beside each other, and how near the latter comes to the hardware's bound:
`python -m benchmarks.tenants [--tenants N] [--rounds N] [--steps N] [--base-models N] [--out FILE]`.

A real `skyrl serve` with the tiny model, real vLLM and real training, one thread each, on two cores. The tenants A and
B, or up to four, are processes with the unmodified SDK. A round runs A alone, B alone, and A beside B; every other
round in the other order. "A then B" is the sum of the first two wall times. With two base models each tenant
trains its own, so that the server has two trainers and two vLLMs; both have the files of the tiny model.

The bound is a wall time below which A beside B cannot be. With C cores, let c(p) be the CPU seconds of each part p of
the run (trainer, vLLM, API, clients, others), and t(i) those of each thread i of these processes. C cores do at most C
CPU seconds per second, and a thread is on at most one core at a time:

    bound = max(sum over p of c(p) / C, max over i of t(i))

A trainer computes on one thread, and so does a vLLM, so the second term holds when either is the narrow place. All CPU
seconds are those of the run of A beside B. The reached share is the bound over the measured wall time, and the best
possible speed-up is A then B over the bound.

The bound leaves out that a loop is a chain: a step needs its own samples, and a sample the update before it. The chain
by itself is the wall time of a tenant alone (`chain_s` is that of the slower one). `schedule_s` takes both into
account: the shortest time of any schedule of two such chains (`benchmarks.best_schedule`). `of_schedule` is that over
the measured wall time. `greedy_s` is the time of the schedule in which each loop runs whenever it can. They are left
out with more than two tenants.

A line for each run says where its CPU seconds went (for wall time see the pages of the runs). `foreign` is what other
programs took; with more than a tenth of a core the wall times say little.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import best_schedule, program
from benchmarks.machine import facts
from benchmarks.processes import busy_seconds, computing_of, cpu_seconds, processes_of, thread_seconds
from skyrl.cli.demo.rl import Settings
from skyrl.cli.demo.server import DemoServer
from skyrl.cli.demo.tenants import Run, Tenant

CORES = 2
TENANTS = {"A": "count", "B": "sort", "C": "count", "D": "sort"}
"""The task of each."""
TWO = ("A", "B")
CONFIG = {"trainer.policy.model.lora.max_lora_rank": 8}
"""As in the demo: vLLM pads every adapter to the maximal rank."""
COMPUTING = ("trainer", "vllm")


@dataclass(frozen=True)
class Spent:
    """One run. Seconds: its wall time, the CPU time of each part, and that of the busiest thread of each part.
    `idle_s` is the time of all cores without work, `foreign_s` the CPU time of other programs. `sample_s` and
    `train_s`: the times of each step, if one tenant ran alone."""

    wall_s: float
    cpu_s: Mapping[str, float]
    busiest_thread_s: Mapping[str, float]
    idle_s: float = 0.0
    foreign_s: float = 0.0
    sample_s: Sequence[float] = ()
    train_s: Sequence[float] = ()


def bound(run: Spent, cores: int) -> float:
    """The shortest wall time in seconds for the run's CPU seconds (the module's formula)."""
    return max(sum(run.cpu_s.values()) / cores, *run.busiest_thread_s.values())


def compared(alone: Sequence[Spent], beside: Spent, cores: int) -> dict[str, float]:
    """Seconds, and their ratios: `reached` is bound / beside, `speedup` then / beside, and `best` then / bound.
    `chain_s` is the slower tenant's wall time alone."""
    walls = [run.wall_s for run in alone]
    then_s, beside_s, bound_s = sum(walls), beside.wall_s, bound(beside, cores)
    ratios = {"reached": bound_s / beside_s, "speedup": then_s / beside_s, "best": then_s / bound_s}
    return {"then_s": then_s, "beside_s": beside_s, "bound_s": bound_s, "chain_s": max(walls)} | ratios


def scheduled(alone: Sequence[Spent], beside: Spent, cores: int) -> dict[str, float]:
    """Seconds of the shortest and of the greedy schedule of two tenants, and the share that the run beside each other
    reaches of the shortest. What a tenant takes outside of its steps, as for creating its model, counts as the begin of
    its first phase."""
    first, second = map(_chain, alone)
    seconds = best_schedule.shortest(first, second, cores)
    greedy_s = best_schedule.greedy(first, second, cores)
    return {"greedy_s": greedy_s, "schedule_s": seconds, "of_schedule": seconds / beside.wall_s}


def _chain(run: Spent) -> list[best_schedule.Phase]:
    before_s = run.wall_s - sum(run.sample_s) - sum(run.train_s)
    sample_s = [run.sample_s[0] + before_s, *run.sample_s[1:]]
    threads = run.busiest_thread_s
    return best_schedule.phases(sample_s, run.train_s, threads["trainer"], threads["vllm"], sum(run.cpu_s.values()))


def medians(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}


class Scene:
    """The server, with `flags`, and a process for each tenant. `own_models`: each tenant trains a base model of its
    own."""

    def __init__(
        self, stack: ExitStack, names: Sequence[str], *, own_models: bool = False, flags: Sequence[str] = ()
    ) -> None:
        state = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="skyrl-tenants-")))
        entries = [{"base_model": "tiny", "served_model_names": [f"tiny-{name}"]} for name in names]
        several = ("--base-models", json.dumps(entries)) if own_models else ()
        self._base_model = {name: f"tiny-{name}" if own_models else "tiny" for name in names}
        self._server = DemoServer(state / "state", *several, *flags, backend_config=CONFIG)
        stack.callback(self._server.stop)
        self._server.start()
        self._tenants: dict[str, Tenant] = {}
        for name in names:
            tenant = self._tenants[name] = Tenant(name, TENANTS[name], state)
            stack.callback(tenant.stop)
        self._server.wait_ready()
        for tenant in self._tenants.values():
            tenant.wait_up()
        self._pids = self._parts()
        self.run(names, Settings(steps=2))  # first steps take longer

    def _parts(self) -> dict[str, list[int]]:
        """The process ids of each part."""
        computing, api = computing_of(self._server.pid), processes_of(self._server.pid)["api"]
        clients = [tenant.pid for tenant in self._tenants.values()]
        own = {"clients": clients, "others": [self._server.pid, os.getpid()]}
        return {"trainer": computing["trainer"], "vllm": computing["vLLM"], "api": api} | own

    def run(self, names: Sequence[str], settings: Settings) -> Spent:
        """Run these tenants at the same time. Raises TenantFailed."""
        tenants = [self._tenants[name] for name in names]
        runs = [Run() for _ in names]
        before, threads_before, busy = self._cpu(), self._threads(), busy_seconds()
        began = time.perf_counter()
        for tenant in tenants:
            tenant.start(self._server.url, self._base_model[tenant.name], settings)
        with ThreadPoolExecutor(len(tenants)) as pool:
            list(pool.map(lambda tenant, run: tenant.follow(run), tenants, runs))
        wall = time.perf_counter() - began
        used = {part: after - before[part] for part, after in self._cpu().items()}
        busy = busy_seconds() - busy
        busiest = {
            part: max(seconds - threads_before[part].get(thread, 0.0) for thread, seconds in after.items())
            for part, after in self._threads().items()
        }
        idle = (os.cpu_count() or CORES) * wall - busy
        foreign = max(0.0, busy - sum(used.values()))
        steps = (runs[0].sample_s, runs[0].train_s) if len(runs) == 1 else ()
        return Spent(wall, used, busiest, idle, foreign, *steps)

    def _cpu(self) -> dict[str, float]:
        return {part: sum(cpu_seconds(pid) for pid in pids) for part, pids in self._pids.items()}

    def _threads(self) -> dict[str, dict[tuple[int, int], float]]:
        return {
            part: {(pid, thread): s for pid in pids for thread, s in thread_seconds(pid).items()}
            for part, pids in self._pids.items()
        }


def measure(names: Sequence[str], rounds: int, settings: Settings, *, own_models: bool) -> list[dict[str, Any]]:
    """One entry per round: the runs by name, and what `compared` gives. Prints a line for each run."""
    found: list[dict[str, Any]] = []
    beside = tuple(names)
    order = [*((name,) for name in names), beside]
    with ExitStack() as stack:
        scene = Scene(stack, names, own_models=own_models)
        for number in range(rounds):
            runs: dict[tuple[str, ...], Spent] = {}
            for of_run in order if number % 2 == 0 else reversed(order):
                runs[of_run] = scene.run(of_run, settings)
                print(line(of_run, runs[of_run]), flush=True)
            alone = [runs[name,] for name in names]
            result = compared(alone, runs[beside], CORES)
            if beside == TWO:
                result |= scheduled(alone, runs[beside], CORES)
            found.append(result | {"runs": {"+".join(of_run): asdict(run) for of_run, run in runs.items()}})
    return found


def line(names: Sequence[str], run: Spent) -> str:
    cpu = ", ".join(f"{part} {seconds:.2f}" for part, seconds in run.cpu_s.items())
    threads = ", ".join(f"{part} {run.busiest_thread_s[part]:.2f}" for part in COMPUTING)
    return (
        f"{' beside '.join(names):10} {run.wall_s:6.2f} s; CPU s: {cpu}; busiest thread: {threads}; "
        f"cores idle {run.idle_s / run.wall_s:.2f}, foreign {run.foreign_s / run.wall_s:.2f}"
    )


def main() -> None:
    parser = program.parser("tenants", __doc__, out="bench/tenants.json")
    parser.add_argument("--tenants", type=int, choices=range(2, len(TENANTS) + 1), default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12, help="steps of a tenant in each run")
    parser.add_argument("--base-models", type=int, choices=(1, 2), default=1, help="2: one for each of two tenants")
    options = parser.parse_args()
    if options.base_models == 2 and options.tenants != 2:
        parser.error("--base-models 2 is for two tenants")
    names = tuple(TENANTS)[: options.tenants]
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])  # the server and the tenants inherit it
    machine = facts()
    found = measure(names, options.rounds, Settings(steps=options.steps), own_models=options.base_models == 2)
    figures = medians([{name: value for name, value in each.items() if name != "runs"} for each in found])
    print(", ".join(f"{name} {value:.2f}" for name, value in figures.items()))
    result = {"facts": machine, "settings": asdict(Settings(steps=options.steps)), "medians": figures, "rounds": found}
    program.write(options.out, result)


if __name__ == "__main__":
    main()
