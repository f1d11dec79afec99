"""Queues of commands: one per model, in the order of their numbers; one for samples, fair between tenants."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field

from skyrl.types.command import Command
from skyrl.types.kinds import Kind


@dataclass(slots=True)
class ModelQueue:
    """Commands of one model that have arrived, by seq_id. `next_seq` is the number of the first command that has not
    been taken. `unloads` have no seq_id: an unload runs after all commands that arrived before it and can run."""

    next_seq: int
    waiting: dict[int, Command] = field(default_factory=dict)
    unloads: list[Command] = field(default_factory=list)

    def head(self) -> Command | None:
        """The model's next command; None while it has not arrived."""
        numbered = self._numbered()
        if self.unloads and (numbered is None or numbered.n > self.unloads[0].n):
            return self.unloads[0]
        return numbered

    def _numbered(self) -> Command | None:
        """The next command with a seq_id. A number below next_seq has arrived late: it is next at once."""
        if (command := self.waiting.get(self.next_seq)) is not None:
            return command
        late = [seq for seq in self.waiting if seq < self.next_seq]
        return self.waiting[min(late)] if late else None

    def take(self) -> Command:
        command = self.head()
        assert command is not None
        if command.kind is Kind.UNLOAD_MODEL:
            return self.unloads.pop(0)
        assert command.seq_id is not None
        del self.waiting[command.seq_id]
        self.next_seq = max(self.next_seq, command.seq_id + 1)
        return command

    def commands(self) -> list[Command]:
        return [*self.waiting.values(), *self.unloads]


class SampleQueue:
    """Samples that a colocated engine runs; those of one tenant in the order of their arrival."""

    def __init__(self) -> None:
        self._waiting: defaultdict[str, deque[Command]] = defaultdict(deque)
        """By tenant. Tenants without samples are not in it."""

    def add(self, command: Command) -> None:
        self._waiting[command.tenant].append(command)

    def take(self, limit: int) -> list[Command]:
        """Remove and return up to `limit` samples, one of each tenant in turn."""
        taken: list[Command] = []
        while self._waiting and len(taken) < limit:
            for tenant, theirs in list(self._waiting.items())[: limit - len(taken)]:
                taken.append(theirs.popleft())
                if not theirs:
                    del self._waiting[tenant]
        return taken

    @property
    def last_row(self) -> int:
        """The highest row number of the samples that wait, 0 without any."""
        return max((command.n for theirs in self._waiting.values() for command in theirs), default=0)

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))
