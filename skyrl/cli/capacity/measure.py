"""The course of `skyrl capacity`: what tenants do on a server of its own, and what is measured meanwhile.

Knows which operations tell what. Does not know what follows from the numbers.
"""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from skyrl.cli.capacity.answer import MIXED, Found, Load, Operation, Passed, Throughput
from skyrl.cli.capacity.client import Clock, OutOfTime, Tenant, Times, kept_busy
from skyrl.cli.capacity.memory import TRAINER, VLLM, Memory
from skyrl.cli.demo.server import DemoServer
from skyrl.runtime.processes.usage import cpu_seconds, parts_of_server

SETTLE_S = 35.0
"""The trainer gives back what it has freed when it has been idle for 30 s."""
SHORTEST_S, LONGEST_S = 4.0, 15.0
"""Of a measured window."""
WARM_ROWS, REPEATS = 128, 3
LONGEST_ROW = 512
PASS_SHARE = 0.15
"""The part of the time that is left which the largest training pass may take."""
ENOUGH_BYTES = 200e6
"""The adapters that are added take so much together, if that is not too many."""
FEWEST, MOST = 2, 8
"""Adapters that are added."""
_CACHE = re.compile(r"KV cache size: ([\d,]+) tokens")


class Course:
    """Measures one running server. `rows`: the tokens of the largest training pass. `adapter`: the bytes that an
    adapter in training is expected to take; 0 if that is not known. `say`: is told what is done now."""

    def __init__(
        self,
        server: DemoServer,
        memory: Memory,
        clock: Clock,
        load: Load,
        *,
        base_model: str,
        rank: int,
        vocabulary: int,
        rows: int,
        adapter: float,
        slots: int,
        say: Callable[[str], None],
    ) -> None:
        self._server, self._memory, self._clock, self._load, self._say = server, memory, clock, load, say
        self._base_model, self._rank, self._vocabulary, self._rows = base_model, rank, vocabulary, rows
        self._adapter, self._slots = adapter, slots
        self._times = Times()
        self._notes: list[str] = []
        self._throughput: list[Throughput] = []
        self._tenants: list[Tenant] = []
        self._row_s = 0.0
        """Seconds that a token of a training pass takes."""

    def run(self, stack: ExitStack) -> Found:
        """Everything, in an order in which each part is measured before the next one disturbs it. What there is no time
        for is left out, with a note; but not the operations, nor a training pass. Raises Failed."""
        ready = self._memory.used()
        first = self._new(stack)
        self._row_s = self._train(first)
        if VLLM in ready:  # it still had the adapters of the check at the start
            ready[VLLM] = min(ready[VLLM], self._memory.used()[VLLM])
        self._save_and_sample(first)
        settled = self._sampling("sampling, 1 adapter")
        resting = self._memory.used()[TRAINER]
        passed = self._largest_pass(first, resting)
        adapter = sampled = None
        with self._if_time("more adapters"):
            added = self._add(stack)
            sampled = self._sample_all(added)
            again = self._sampling(f"sampling, {len(self._tenants)} adapters")
            if settled and again:
                adapter = max(0.0, self._memory.used()[TRAINER] - resting) / len(added)
        if not adapter:
            self._notes.append("the memory of an adapter in training is estimated: --minutes is too short")
        self._window("training alone", samplers=0, trains=True)
        self._window(MIXED, samplers=self._load.samples, trains=True)
        return Found(
            available=self._memory.available,
            ready=ready,
            passed=passed,
            adapter=adapter or None,
            sampled=sampled or None,
            cache_tokens=_cache_tokens(self._server.state_dir / "logs"),
            throughput=self._throughput,
            operations=[
                Operation(name, len(seconds), statistics.median(seconds), max(seconds))
                for name, seconds in self._times.of.items()
            ],
            start_s=self._server.ready_s,
            notes=self._notes,
        )

    def _new(self, stack: ExitStack) -> Tenant:
        tenant = Tenant(self._server.url, len(self._tenants), self._base_model, self._clock, self._times)
        stack.callback(tenant.close)
        tenant.create(self._rank)
        self._tenants.append(tenant)
        return tenant

    def _sequences(self, tenant: Tenant, rows: int) -> list[list[int]]:
        """Sequences whose passes have `rows` tokens together, or a few less."""
        each = min(LONGEST_ROW, rows)
        return [tenant.tokens(each + 1, self._vocabulary) for _ in range(max(1, rows // each))]

    @contextmanager
    def _if_time(self, what: str) -> Iterator[None]:
        """Inside, time that is over ends the block, and is noted."""
        try:
            yield
        except OutOfTime:
            self._notes.append(f"{what}: not measured, --minutes is too short")

    @contextmanager
    def _uncounted(self) -> Iterator[None]:
        self._times.counting = False
        try:
            yield
        finally:
            self._times.counting = True

    def _train(self, tenant: Tenant) -> float:
        """The operations of training. Returns the seconds that a token of a pass takes."""
        self._say("training")
        with self._uncounted():
            tenant.train(self._sequences(tenant, WARM_ROWS))
            tenant.step()
        rows = self._sequences(tenant, min(self._load.trained, self._rows))
        seconds: list[float] = []
        for _ in range(REPEATS):
            tenant.train(rows, "forward")
            began = time.monotonic()
            tenant.train(rows)
            seconds.append(time.monotonic() - began)
            tenant.step()
        return statistics.median(seconds) / sum(len(row) - 1 for row in rows)

    def _peak(self, tenant: Tenant, rows: int) -> float:
        """The most bytes of the trainer during a pass over so many tokens and the step after it."""
        self._memory.watch()
        with self._uncounted():
            tenant.step_of(self._sequences(tenant, rows))
        return self._memory.peak()

    def _largest_pass(self, tenant: Tenant, resting: float) -> Passed:
        """The largest pass that the time allows, from a trainer at rest: what an earlier pass has freed would count,
        too. Where that is not the largest of all, a smaller one before it tells what a token takes. `resting`: bytes of
        the trainer before."""
        small = min(self._load.trained, self._rows)
        allowed = int(PASS_SHARE * self._clock.left_s / self._row_s) // LONGEST_ROW * LONGEST_ROW
        if allowed >= self._rows or small == self._rows:
            self._say(f"a training pass of {self._rows:,} tokens")
            return Passed(self._rows, self._rows, max(0.0, self._peak(tenant, self._rows) - resting))
        largest = max(small, allowed)
        self._say(f"a training pass of {largest:,} tokens")
        found = self._peak(tenant, small) - resting
        of_row = found / small
        if largest > small:
            of_small, found = found, self._peak(tenant, largest) - resting
            of_row = (found - of_small) / (largest - small)
        self._notes.append(
            f"a training pass of {self._rows:,} tokens was not measured: what {largest:,} took is drawn on"
        )
        return Passed(self._rows, largest, max(0.0, found) + max(0.0, of_row) * (self._rows - largest))

    def _save_and_sample(self, tenant: Tenant) -> None:
        self._say("versions, samples and checkpoints")
        prompt = tenant.tokens(self._load.prompt, self._vocabulary)
        for number in range(REPEATS):
            with self._uncounted():
                tenant.step_of(self._sequences(tenant, 16))
            tenant.save()
            tenant.sample(prompt, 1, "first token of a new version")
            tenant.sample(prompt, self._load.answer)
            tenant.save_and_load(f"capacity-{number}")

    def _sampling(self, what: str) -> bool:
        """Sample alone. Returns whether that took long enough for the trainer to come to rest: only where the time is
        enough for the two windows with training, too."""
        settles = self._memory.settles
        enough = settles and self._clock.left_s > SETTLE_S + 2 * (4 * SHORTEST_S + 2 * self._row_s * self._load.trained)
        self._window(what, samplers=self._load.samples, trains=False, seconds=SETTLE_S if enough else None)
        return enough or not settles

    def _window(self, what: str, *, samplers: int, trains: bool, seconds: float | None = None) -> None:
        """Some seconds with so many samples in flight, from all tenants in turns, while the first one trains or not."""
        with self._if_time(what):
            self._clock.check()
            self._measure_window(what, samplers, trains, seconds)

    def _measure_window(self, what: str, samplers: int, trains: bool, seconds: float | None) -> None:
        seconds = seconds or min(LONGEST_S, max(SHORTEST_S, self._clock.left_s / 12))
        self._say(f"{what}, {seconds:.0f} s")
        first = self._tenants[0]
        workers: list[Callable[[], float]] = [
            self._sampler(self._tenants[number % len(self._tenants)]) for number in range(samplers)
        ]
        if trains:
            workers.append(lambda: self._trained(first))
        before, began = self._cpu(), time.monotonic()
        with self._uncounted():
            done = kept_busy(workers, seconds)
        elapsed = time.monotonic() - began
        busy = {part: (after - before[part]) / elapsed for part, after in self._cpu().items()}
        sampled, trained = sum(done[:samplers]), sum(done[samplers:])
        self._throughput.append(Throughput(what, sampled / seconds, trained / seconds, busy))

    def _sampler(self, tenant: Tenant) -> Callable[[], float]:
        return lambda: tenant.sample(tenant.tokens(self._load.prompt, self._vocabulary), self._load.answer)

    def _trained(self, tenant: Tenant) -> float:
        rows = self._sequences(tenant, min(self._load.trained, self._rows))
        tenant.step_of(rows)
        return sum(len(row) - 1 for row in rows)

    def _cpu(self) -> dict[str, float]:
        parts = parts_of_server(self._server.pid)
        return {part: sum(map(cpu_seconds, pids)) for part, pids in parts.items()}

    def _add(self, stack: ExitStack) -> list[Tenant]:
        """More tenants, each with moments and a gradient."""
        wanted = MOST if not self._adapter else min(MOST, max(FEWEST, int(ENOUGH_BYTES / self._adapter)))
        wanted = max(1, min(wanted, self._slots - 1))
        self._say(f"{wanted} more tenants")
        added: list[Tenant] = []
        for _ in range(wanted):
            added.append(tenant := self._new(stack))
            with self._uncounted():
                tenant.step_of(self._sequences(tenant, 16))
                tenant.train(self._sequences(tenant, 16))
        return added

    def _sample_all(self, added: Sequence[Tenant]) -> float | None:
        """The bytes that vLLM takes for each of these tenants' adapters; None where vLLM's share is fixed."""
        before = self._memory.used()
        for tenant in added:
            tenant.save()
            tenant.sample(tenant.tokens(8, self._vocabulary), 1, "first token of a new version")
        after = self._memory.used()
        return max(0.0, after[VLLM] - before[VLLM]) / len(added) if VLLM in after else None


def _cache_tokens(logs: Path) -> int | None:
    """The tokens of all vLLMs' caches, by the last start of each; None if one does not say."""
    total = 0
    files = list(logs.glob("vllm*.log"))
    for file in files:
        sizes = _CACHE.findall(file.read_text(errors="replace"))
        if not sizes:
            return None
        total += int(sizes[-1].replace(",", ""))
    return total if files else None
