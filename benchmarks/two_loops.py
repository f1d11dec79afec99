"""Two RL loops on two cores, simulated: how near to the CPU bound does the loops' own order let them come?
`python -m benchmarks.two_loops [--seeds N] [--tenants N] [--engine-ms MS] [--trainer-ms MS]`.

The loops of `benchmarks.tenants` as chains of work on threads: save and publish the adapter, sample, train. The CPU
time of each stage is given, by default that of one tenant alone on a quiet machine. Threads that want a core share the
cores evenly. A step needs its own samples, and a sample the update before it; there are no other waits but for threads,
cores and the disk. So the share of the bound that the simulated loops reach is what the order of the work allows.

Ways of sampling:

    batched    vLLM runs all samples at once, as it does: a step with two tenants costs BATCHED_COST of a step with one
    held       while a tenant's samples run, another tenant's wait, up to so many milliseconds

Knows no server. `reached` is the bound over the wall time, as in `benchmarks.tenants`.
"""

from __future__ import annotations

import argparse
import heapq
import math
import random
import statistics
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count

CORES = 2
STEPS = 12
TOKENS, SPREAD = 26, 3
"""Mean and standard deviation of the number of vLLM's steps that one step of a loop takes."""
FRONT_BESIDE = 0.75
"""The share of the front end's work that runs beside the engine's steps."""
BATCHED_COST = 1.45
"""A step of vLLM with 48 sequences of two adapters over one with 24 of one adapter."""

Then = Callable[[], None]


@dataclass(frozen=True)
class Stages:
    """CPU time in milliseconds of one step of one loop: vLLM's engine and front end, the trainer's backend thread and
    its other threads, the API process, the client. `disk` is a wait."""

    engine: float = 137.0
    front: float = 47.0
    trainer: float = 92.0
    files: float = 19.0
    api: float = 22.0
    client: float = 43.0
    disk: float = 5.0


class Machine:
    """Threads that work through their queues. Each runs on one core at most. Times are milliseconds."""

    def __init__(self, cores: int) -> None:
        self._cores = cores
        self._queues: defaultdict[str, deque[tuple[list[float], Then]]] = defaultdict(deque)
        self._timers: list[tuple[float, int, Then]] = []
        self._numbers = count()
        self.now = 0.0
        self.used: defaultdict[str, float] = defaultdict(float)
        """CPU time by thread."""

    def work(self, thread: str, ms: float, then: Then = lambda: None) -> None:
        """Queue work on a thread, then call `then`."""
        self._queues[thread].append(([ms], then))

    def wait(self, ms: float, then: Then) -> None:
        heapq.heappush(self._timers, (self.now + ms, next(self._numbers), then))

    def run(self) -> None:
        """Until nothing is left to do."""
        while (busy := [thread for thread, queue in self._queues.items() if queue]) or self._timers:
            speed = min(1.0, self._cores / len(busy)) if busy else 0.0
            passed = min((self._queues[thread][0][0][0] / speed for thread in busy), default=math.inf)
            if self._timers:
                passed = min(passed, max(0.0, self._timers[0][0] - self.now))
            self.now += passed
            for thread in busy:
                self.used[thread] += passed * speed
                self._queues[thread][0][0][0] -= passed * speed
            for thread in busy:
                if self._queues[thread][0][0][0] <= 1e-9:
                    self._queues[thread].popleft()[1]()
            while self._timers and self._timers[0][0] <= self.now + 1e-9:
                heapq.heappop(self._timers)[2]()

    def chain(self, links: Sequence[tuple[str, float]], then: Then) -> None:
        """Work on one thread after another. The thread "disk" is a wait."""
        if not links:
            then()
            return
        (thread, ms), rest = links[0], links[1:]
        start = self.wait if thread == "disk" else lambda ms, then: self.work(thread, ms, then)
        start(ms, lambda: self.chain(rest, then))


class Sampler:
    """vLLM. The loops that sample share its steps."""

    def __init__(self, machine: Machine, stages: Stages, hold_ms: float) -> None:
        self._machine, self._stages, self._hold_ms = machine, stages, hold_ms
        self._left: dict[str, int] = {}
        """By loop that samples, the number of steps left."""
        self._then: dict[str, Then] = {}
        self._waiting: dict[str, int] = {}
        self._running = False

    def sample(self, loop: str, steps: int, then: Then) -> None:
        self._then[loop], self._waiting[loop] = then, steps
        if self._left and self._hold_ms:
            self._machine.wait(self._hold_ms, lambda: self._start(loop))
        else:
            self._start(loop)

    def _start(self, loop: str) -> None:
        if loop in self._waiting:
            self._left[loop] = self._waiting.pop(loop)
        if self._left and not self._running:
            self._step()

    def _step(self) -> None:
        self._running = True
        cost = self._stages.engine / TOKENS * (1 + (BATCHED_COST - 1) * (len(self._left) - 1))
        self._machine.work("engine", cost, self._stepped)

    def _stepped(self) -> None:
        self._running = False
        for loop in list(self._left):
            self._machine.work("front", self._stages.front * FRONT_BESIDE / TOKENS)
            self._left[loop] -= 1
            if not self._left[loop]:
                del self._left[loop]
                self._then.pop(loop)()
        if not self._left and self._waiting:
            self._start(next(iter(self._waiting)))
        elif self._left and not self._running:
            self._step()


def start_loop(machine: Machine, sampler: Sampler, name: str, stages: Stages, rng: random.Random) -> None:
    """Run STEPS steps: save and publish the adapter, sample, train twice."""
    front = stages.front * (1 - FRONT_BESIDE) / 2
    before = [("client " + name, 0.3 * stages.client), ("api", 0.4 * stages.api), ("files", stages.files)]
    before += [("disk", stages.disk), ("front", front)]
    between = [("front", front), ("api", 0.3 * stages.api), ("client " + name, 0.4 * stages.client)]

    def step(left: int) -> None:
        if left:
            machine.chain(before, lambda: sample(left))

    def sample(left: int) -> None:
        sampler.sample(
            name, max(1, round(rng.gauss(TOKENS, SPREAD))), lambda: machine.chain(between, lambda: train(left))
        )

    def train(left: int) -> None:
        machine.work("client " + name, 0.3 * stages.client)
        machine.work("api", 0.3 * stages.api)
        machine.work("trainer", stages.trainer * rng.uniform(0.9, 1.1), lambda: step(left - 1))

    step(STEPS)


@dataclass(frozen=True)
class Simulated:
    """Milliseconds: the wall time, and its bound from the CPU time."""

    wall_ms: float
    bound_ms: float


def simulate(stages: Stages, tenants: int, hold_ms: float = 0.0, seed: int = 0) -> Simulated:
    """Run the loops of so many tenants from the same start. `hold_ms` 0: batched."""
    machine = Machine(CORES)
    sampler = Sampler(machine, stages, hold_ms)
    for number in range(tenants):
        start_loop(machine, sampler, f"{number}", stages, random.Random(f"{seed}/{number}"))
    machine.run()
    return Simulated(machine.now, max(sum(machine.used.values()) / CORES, *machine.used.values()))


def main() -> None:
    parser = argparse.ArgumentParser(description="Two RL loops on two cores, simulated.")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--tenants", type=int, default=2)
    parser.add_argument("--engine-ms", type=float, default=Stages.engine, help="of vLLM's engine, in a step of a loop")
    parser.add_argument("--trainer-ms", type=float, default=Stages.trainer, help="of the trainer's backend thread")
    options = parser.parse_args()
    stages = replace(Stages(), engine=options.engine_ms, trainer=options.trainer_ms)
    print(f"one tenant alone: {simulate(stages, 1).wall_ms:,.0f} ms for {STEPS} steps")
    print("| sampling | wall | bound | reached |\n|---|---|---|---|")
    for hold_ms in (0.0, 25.0, 50.0, 100.0, 200.0):
        runs = [simulate(stages, options.tenants, hold_ms, seed) for seed in range(options.seeds)]
        wall, bound = (statistics.mean(getattr(run, name) for run in runs) for name in ("wall_ms", "bound_ms"))
        name = f"held up to {hold_ms:.0f} ms" if hold_ms else "batched"
        print(f"| {name} | {wall:,.0f} ms | {bound:,.0f} ms | {bound / wall:.0%} |")


if __name__ == "__main__":
    main()
