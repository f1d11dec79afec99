"""The course of `skyrl capacity`: what tenants do on a server of its own, and what is measured meanwhile.

Knows which operations tell what. Does not know what follows from the numbers.
"""

from __future__ import annotations

import itertools
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
REPEAT_SHARE = 0.2
"""The part of the time that is left which operations may take that are repeated."""
LONGEST_ROW = 512
PASS_SHARE = 0.15
"""The same for the largest training pass."""
ENOUGH_BYTES = 200e6
"""The adapters that are added take so much together, if they are not too many."""
FEWEST, MOST = 2, 48
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
        self._times, self._numbers = Times(), itertools.count()
        self._missing: list[str] = []
        self._throughput: list[Throughput] = []
        self._tenants: list[Tenant] = []
        """Who have a version to sample from, but for the first one at the beginning."""
        self._row_s = 0.0
        """Seconds that a token of a training pass takes."""
        self._resting: float | None = None
        """Bytes of the trainer at rest with the first tenant's adapter; None without the time to wait for that."""
        self._passed: Passed | None = None
        self._of_adapter: float | None = None
        self._of_sampled: float | None = None

    def run(self, stack: ExitStack) -> Found:
        """Everything, in an order in which each part is measured before the next one disturbs it. What there is no time
        for is left out, with a note. Raises Failed."""
        ready = self._memory.used()
        self._if_time("training", lambda: self._train(stack))
        if VLLM in ready:  # it still had the adapters of the check at the start
            ready[VLLM] = min(ready[VLLM], self._memory.used()[VLLM])
        self._if_time("versions, samples and checkpoints", self._save_and_sample)
        self._if_time("sampling, 1 adapter", self._sample_alone)
        self._if_time("the largest training pass", self._largest_pass)
        self._if_time("adapters in training", lambda: self._add(stack))
        self._if_time("training alone", lambda: self._window("training alone", samplers=0, trains=True))
        self._if_time(MIXED, lambda: self._window(MIXED, samplers=self._load.samples, trains=True))
        notes = [f"not measured, give more --minutes: {', '.join(self._missing)}"] if self._missing else []
        return Found(
            available=self._memory.available,
            ready=ready,
            passed=self._passed,
            adapter=self._of_adapter,
            sampled=self._of_sampled,
            cache_tokens=_cache_tokens(self._server.state_dir / "logs"),
            throughput=self._throughput,
            operations=[
                Operation(name, len(seconds), statistics.median(seconds), max(seconds))
                for name, seconds in self._times.of.items()
            ],
            start_s=self._server.ready_s,
            notes=notes,
        )

    def _if_time(self, what: str, measure: Callable[[], None]) -> None:
        """Time that is over, or over meanwhile, leaves a part out, and is noted."""
        try:
            self._clock.check()
            self._say(what)
            measure()
        except OutOfTime:
            self._missing.append(what)

    def _new(self, stack: ExitStack) -> Tenant:
        tenant = Tenant(self._server.url, next(self._numbers), self._base_model, self._clock, self._times)
        stack.callback(tenant.close)
        tenant.create(self._rank)
        return tenant

    def _sequences(self, tenant: Tenant, rows: int) -> list[list[int]]:
        """Sequences whose passes have `rows` tokens together, or a few less."""
        each = min(LONGEST_ROW, rows)
        return [tenant.tokens(each + 1, self._vocabulary) for _ in range(max(1, rows // each))]

    @contextmanager
    def _uncounted(self) -> Iterator[None]:
        self._times.counting = False
        try:
            yield
        finally:
            self._times.counting = True

    def _repeated(self) -> Iterator[int]:
        """The numbers of repetitions: up to REPEATS, but after the first one none beyond REPEAT_SHARE."""
        began, allowed = time.monotonic(), REPEAT_SHARE * self._clock.left_s
        for number in range(REPEATS):
            if number and (time.monotonic() - began) * (number + 1) / number > allowed:
                break
            yield number

    def _train(self, stack: ExitStack) -> None:
        """The operations of training, by the first tenant."""
        first = self._new(stack)
        self._tenants.append(first)
        with self._uncounted():
            first.train(self._sequences(first, WARM_ROWS))
            first.step()
        rows = self._sequences(first, min(self._load.trained, self._rows))
        seconds: list[float] = []
        for _ in self._repeated():
            first.train(rows, "forward")
            began = time.monotonic()
            first.train(rows)
            seconds.append(time.monotonic() - began)
            first.step()
        self._row_s = statistics.median(seconds) / sum(len(row) - 1 for row in rows)

    def _peak(self, tenant: Tenant, rows: int) -> float:
        """The most bytes of the trainer during a pass over so many tokens and the step after it."""
        self._memory.watch()
        with self._uncounted():
            tenant.step_of(self._sequences(tenant, rows))
        return self._memory.peak()

    def _largest_pass(self) -> None:
        """The largest pass that the time allows. It takes what earlier ones have freed and a resting trainer has given
        back, so that it is the peak of both."""
        allowed = int(PASS_SHARE * self._clock.left_s / self._row_s) // LONGEST_ROW * LONGEST_ROW
        rows = min(self._rows, max(self._load.trained, allowed))
        self._passed = Passed(rows, self._peak(self._tenants[0], rows), full=rows == self._rows)

    def _save_and_sample(self) -> None:
        first = self._tenants[0]
        prompt = first.tokens(self._load.prompt, self._vocabulary)
        for number in self._repeated():
            with self._uncounted():
                first.step_of(self._sequences(first, 16))
            first.save()
            first.sample(prompt, 1, "first token of a new version")
            first.sample(prompt, self._load.answer)
            first.save_and_load(f"capacity-{number}")

    def _sample_alone(self) -> None:
        """Sample from the first tenant, until the trainer is at rest if there is the time to wait for that twice."""
        if self._sampling("sampling, 1 adapter", rests=2):
            self._resting = self._memory.used()[TRAINER]

    def _sampling(self, what: str, *, rests: int) -> bool:
        """Sample from all tenants who have a version, while nobody trains. Whether the trainer is at rest then: only
        where the time is enough to wait for that so many times, and for the training that follows."""
        left_s = (1 - PASS_SHARE if self._passed is None else 1) * self._clock.left_s
        training_s = 2 * (SHORTEST_S + self._row_s * self._load.trained)
        settles = self._memory.settles
        enough = settles and rests > 0 and left_s > rests * SETTLE_S + training_s
        self._window(what, samplers=self._load.samples, seconds=SETTLE_S if enough else None)
        return enough or not settles

    def _window(self, what: str, *, samplers: int, trains: bool = False, seconds: float | None = None) -> None:
        """Some seconds with so many samples in flight, from all tenants in turns, while the first one trains or not."""
        seconds = seconds or min(LONGEST_S, max(SHORTEST_S, self._clock.left_s / 12))
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

    def _add(self, stack: ExitStack) -> None:
        """More tenants, each with moments and a gradient; then the trainer comes to rest while they sample."""
        wanted = max(FEWEST, min(MOST, int(ENOUGH_BYTES / self._adapter))) if self._adapter else FEWEST
        added: list[Tenant] = []
        for _ in range(wanted):
            added.append(tenant := self._new(stack))
            with self._uncounted():
                tenant.step_of(self._sequences(tenant, 16))
                tenant.train(self._sequences(tenant, 16))
        self._sample_all(added)
        what = f"sampling, {len(self._tenants)} adapters"
        if not self._sampling(what, rests=0 if self._resting is None else 1) or self._resting is None:
            raise OutOfTime("too little for a trainer at rest")
        self._of_adapter = max(0.0, self._memory.used()[TRAINER] - self._resting) / len(added) or None

    def _sample_all(self, added: Sequence[Tenant]) -> None:
        """A version of each of these tenants, while there are slots that no earlier version had: what each takes there
        and beside. Where vLLM's share is fixed, nothing is measured."""
        unused = self._slots - len(self._times.of.get("save_weights_for_sampler", ()))
        before = self._memory.used()
        for tenant in added[: max(1, unused)]:
            tenant.save()
            tenant.sample(tenant.tokens(8, self._vocabulary), 1, "first token of a new version")
            self._tenants.append(tenant)
        after = self._memory.used()
        if VLLM in after and unused > 0:
            self._of_sampled = max(0.0, after[VLLM] - before[VLLM]) / (len(self._tenants) - 1) or None


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
