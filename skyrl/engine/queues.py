"""What the scheduler chooses from: a queue of commands for each model, in the order of their numbers; a queue of
samples, fair between tenants; delayed commands; and the fair shares of tenants and models.

A delayed command's tenant has no tokens of its quota left for the command yet. The scheduler treats the command as if
it had not arrived: the model's later commands wait for it, and other models do not wait.

Pure bookkeeping. Knows neither what a command does nor the database.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from skyrl.base.types.requests import Command, Kind

LONGEST_STEP = 256
"""So many passes of a step are looked at, because that is done again for each pass."""


@dataclass(slots=True)
class ModelQueue:
    """The waiting commands of one model, by seq_id. `next_seq` is the seq_id of the next command to take.

    `unloads` have no seq_id: an unload runs after all runnable commands that arrived before the unload.
    """

    next_seq: int
    waiting: dict[int, Command] = field(default_factory=dict)
    unloads: list[Command] = field(default_factory=list)
    _step_size: int | None = None
    """`step_size`, or None if it must be counted again."""

    def head(self) -> Command | None:
        """The model's next command; None until the next command has arrived."""
        numbered = self.waiting.get(self.next_seq)
        if self.unloads and (numbered is None or numbered.n > self.unloads[0].n):
            return self.unloads[0]
        return numbered

    def add(self, command: Command) -> None:
        """Queue a command with a seq_id, which must not be below `next_seq`."""
        assert command.seq_id is not None
        assert command.seq_id >= self.next_seq
        self.waiting[command.seq_id] = command
        self._step_size = None

    @property
    def step_size(self) -> int:
        """The bytes of the next passes: up to the next exclusive command or the first command that has not arrived, and
        of at most LONGEST_STEP passes."""
        if self._step_size is None:
            self._step_size = 0
            for seq_id in range(self.next_seq, self.next_seq + LONGEST_STEP):
                command = self.waiting.get(seq_id)
                if command is None or not command.is_pass:
                    break
                self._step_size += command.size
        return self._step_size

    def take(self) -> Command:
        command = self.head()
        assert command is not None
        if command.kind is Kind.UNLOAD_MODEL:
            return self.unloads.pop(0)
        assert command.seq_id is not None
        del self.waiting[command.seq_id]
        self._step_size = None
        self.next_seq = command.seq_id + 1
        return command

    def skip_to(self, next_seq: int) -> list[Command]:
        """Take the commands with numbers below `next_seq` out of the queue, and go on with that number."""
        skipped = [self.waiting.pop(seq) for seq in sorted(self.waiting) if seq < next_seq]
        self._step_size = None
        self.next_seq = next_seq
        return skipped

    def commands(self) -> list[Command]:
        return [*self.waiting.values(), *self.unloads]


@dataclass(slots=True)
class ModelView:
    """A model's commands at one moment: those that wait for their turn, for the quota (`delayed`, each with its start),
    and those that run. `next_seq` is the seq_id of the next command to take. `held`: no command may start now."""

    next_seq: int
    head: Command | None
    waiting: list[Command]
    held: bool
    delayed: list[tuple[float, Command]] = field(default_factory=list)
    running: list[Command] = field(default_factory=list)

    @property
    def has_commands(self) -> bool:
        return bool(self.waiting or self.delayed or self.running)

    @property
    def missing(self) -> int | None:
        """The next number, if it has not arrived and commands with higher numbers have; else None."""
        if self.head is not None or not (self.waiting or self.delayed):
            return None
        due = {command.seq_id for _, command in self.delayed}
        # An unload has no number. It is delayed only behind delayed commands of its model.
        return None if self.next_seq in due or None in due else self.next_seq

    @property
    def commands(self) -> list[Command]:
        """All commands of the model."""
        return [*self.running, *self.waiting, *(command for _, command in self.delayed)]


class SampleQueue:
    """Samples that a colocated engine runs. Each tenant's samples run in the order of their arrival."""

    def __init__(self) -> None:
        self._waiting: defaultdict[str, deque[Command]] = defaultdict(deque)
        """By tenant. Tenants without samples have no entry."""

    def add(self, command: Command) -> None:
        self._waiting[command.tenant].append(command)

    def take(self, limit: int) -> list[Command]:
        """Remove and return up to `limit` samples, one of each tenant in turn."""
        taken: list[Command] = []
        while self._waiting and len(taken) < limit:
            for tenant, samples in list(self._waiting.items())[: limit - len(taken)]:
                taken.append(samples.popleft())
                if not samples:
                    del self._waiting[tenant]
        return taken

    @property
    def last_row(self) -> int:
        """The highest row number of the waiting samples; 0 if none waits."""
        return max((command.n for samples in self._waiting.values() for command in samples), default=0)

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))


class Delayed:
    """Times are seconds since the epoch."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Command]] = []

    def add(self, command: Command, start: float) -> None:
        heapq.heappush(self._heap, (start, command.n, command))

    def start_after_delayed(self, command: Command) -> Command:
        """A copy of `command` that starts after all delayed commands of its model. For commands without a seq_id, which
        would otherwise overtake the delayed commands."""
        starts = [start for start, _, other in self._heap if other.model_id == command.model_id]
        return replace(command, not_before=max(starts)) if starts else command

    def pop(self, now: float) -> list[Command]:
        """Remove and return the commands that may start now, the earliest first."""
        due: list[Command] = []
        while self._heap and self._heap[0][0] <= now:
            due.append(heapq.heappop(self._heap)[2])
        return due

    def pop_model(self, model_id: str) -> list[Command]:
        """Remove and return the commands of a closed model."""
        removed = [command for _, _, command in self._heap if command.model_id == model_id]
        self._heap = [entry for entry in self._heap if entry[2].model_id != model_id]
        heapq.heapify(self._heap)
        return removed

    def commands(self) -> list[tuple[float, Command]]:
        """All delayed commands with their starts, in no order."""
        return [(start, command) for start, _, command in self._heap]

    @property
    def next_start(self) -> float | None:
        return self._heap[0][0] if self._heap else None

    @property
    def last_row(self) -> int:
        return max((n for _, n, _ in self._heap), default=0)

    def __len__(self) -> int:
        return len(self._heap)


class Shares:
    """The amount of work done for each party.

    If the party with the smallest amount is always next, the amounts of two parties that both have work all the time
    differ by at most the largest charge of each.
    """

    def __init__(self) -> None:
        self._amounts: dict[str, int] = {}
        self._floor = 0

    def compete(self, parties: Iterable[str]) -> None:
        """`parties` have work now.

        A party that had no work for a while gets no credit for that time: its amount is raised to the floor, which is
        the smallest amount of a party that had work at the previous call.
        """
        competing = {party: max(self.amount(party), self._floor) for party in parties}
        idle = {
            party: amount for party, amount in self._amounts.items() if party not in competing and amount > self._floor
        }
        self._floor = min(competing.values(), default=self._floor)
        self._amounts = idle | competing

    def amount(self, party: str) -> int:
        return self._amounts.get(party, self._floor)

    def charge(self, party: str, cost: int) -> None:
        self._amounts[party] = self.amount(party) + cost
