"""What the engine does next: each model's commands in seq_id order, models in turn, passes of all models together.

Pure bookkeeping. Does not know what a command does, nor the database.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from skyrl.engine.commands import Command
from skyrl.futures.kinds import BESIDE, PASSES, SAVES, Kind


@dataclass(slots=True)
class _ModelQueue:
    """Commands that have arrived, by seq_id; `next_seq` is the first that has not been taken. `unloads` have no number:
    they come after whatever arrived before them and can run."""

    next_seq: int
    waiting: dict[int, Command] = field(default_factory=dict)
    unloads: list[Command] = field(default_factory=list)

    def head(self) -> Command | None:
        """The next command in order."""
        numbered = self._numbered()
        if self.unloads and (numbered is None or numbered.n > self.unloads[0].n):
            return self.unloads[0]
        return numbered

    def _numbered(self) -> Command | None:
        """A number below next_seq is a late one, whose turn has come already."""
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


class Scheduler:
    """Queues per model. `budget` bounds, in bytes of bodies, what one turn takes from the models it takes together.

    In a turn every ready model has its share: no model waits for more than one share of each other. Whether models'
    passes are taken together or one by one is the loop's. What was taken is running until `finish`, and a model with
    a running command has no next one.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self._queues: dict[str, _ModelQueue] = {}
        self._order: deque[str] = deque()
        self._samples: list[Command] = []
        self._running: dict[int, Command] = {}
        self._busy: set[str] = set()
        self._suspects: set[str] = set()

    def suspect(self, request_ids: Collection[str]) -> None:
        """Requests that were running when the engine died: each runs before all others, and while nothing else does,
        so that if it dies again it is known by whom."""
        self._suspects |= set(request_ids)

    def open_model(self, model_id: str, next_seq: int = 0) -> None:
        if model_id not in self._queues:
            self._queues[model_id] = _ModelQueue(next_seq)
            self._order.append(model_id)

    def close_model(self, model_id: str) -> list[Command]:
        """Forget a model; returns the commands that will never run."""
        queue = self._queues.pop(model_id, None)
        if queue is None:
            return []
        self._order.remove(model_id)
        self._suspects.difference_update(command.request_id for command in queue.commands())
        return queue.commands()

    def hold(self, model_id: str) -> None:
        """Its commands wait until `release`."""
        self._busy.add(model_id)

    def release(self, model_id: str) -> None:
        self._busy.discard(model_id)

    def add(self, command: Command) -> None:
        """Queue a command; its model is opened if it is not."""
        if command.kind is Kind.SAMPLE:
            self._samples.append(command)
            return
        assert command.model_id is not None
        self.open_model(command.model_id)
        queue = self._queues[command.model_id]
        if command.kind is Kind.UNLOAD_MODEL:
            queue.unloads.append(command)
            return
        assert command.seq_id is not None
        queue.waiting[command.seq_id] = command

    def ready_models(self) -> list[str]:
        """Models that have a next command, in this turn's order; the next turn begins with the next model."""
        ready = [m for m in self._order if (head := self._next(m)) is not None and head.kind not in BESIDE]
        self._order.rotate(-1)
        return ready

    def _next(self, model_id: str) -> Command | None:
        head = self._head(model_id)
        return None if head is None or (self._suspects and not self._may_run(head)) else head

    def _head(self, model_id: str) -> Command | None:
        queue = self._queues.get(model_id)
        return None if queue is None or model_id in self._busy else queue.head()

    def _may_run(self, head: Command) -> bool:
        """What goes before all others, and what waits for it."""
        if head.request_id in self._suspects:
            return not self._running
        heads = (self._head(model_id) for model_id in self._order)
        due = any(other is not None and other.request_id in self._suspects for other in heads)
        return not due and not any(command.request_id in self._suspects for command in self._running.values())

    def _of_kinds(self, model_ids: Iterable[str], wanted: Callable[[Command], bool]) -> list[str]:
        """Those whose next command is `wanted`; one alone if that is a suspect."""
        ready = [m for m in model_ids if (head := self._next(m)) is not None and wanted(head)]
        alone = ready and (head := self._head(ready[0])) is not None and head.request_id in self._suspects
        return ready[:1] if alone else ready

    def _together(self, taken: Command, head: Command) -> bool:
        """Whether a pass may join the one before it."""
        return self._suspects.isdisjoint((taken.request_id, head.request_id))

    def _run(self, commands: list[Command]) -> list[Command]:
        for command in commands:
            self._running[command.n] = command
            if command.model_id is not None:
                self._busy.add(command.model_id)
        return commands

    def finish(self, commands: Sequence[Command]) -> None:
        """These commands have been settled."""
        for command in commands:
            self._running.pop(command.n, None)
            self._suspects.discard(command.request_id)
            if command.model_id is not None:
                self._busy.discard(command.model_id)

    def take_passes(self, model_ids: Sequence[str]) -> list[Command]:
        """The next batch of passes of these models, each model's in order, up to its next barrier and its share."""
        ready = self._of_kinds(model_ids, lambda head: head.is_pass)
        if not ready:
            return []
        share = self.budget // len(ready)
        batch: list[Command] = []
        for model_id in ready:
            queue = self._queues[model_id]
            used = 0
            while (head := queue.head()) is not None and head.is_pass:
                if used and (used + head.size > share or not self._together(batch[-1], head)):
                    break
                used += head.size
                batch.append(queue.take())
        return self._run(batch)

    def take_barriers(self, model_ids: Sequence[str]) -> list[Command]:
        """One command of each of these models whose next one is neither a pass nor a save nor a load."""
        kinds = PASSES | BESIDE
        ready = self._of_kinds(model_ids, lambda head: head.kind not in kinds)
        return self._run([self._queues[model_id].take() for model_id in ready])

    def take_beside(self) -> list[Command]:
        """One command of each model whose next one is a save or a load."""
        ready = self._of_kinds(self._order, lambda head: head.kind in BESIDE)
        return self._run([self._queues[model_id].take() for model_id in ready])

    def take_samples(self) -> list[Command]:
        samples, self._samples = self._samples, []
        return self._run(samples)

    def __contains__(self, model_id: str) -> bool:
        return model_id in self._queues

    @property
    def model_ids(self) -> frozenset[str]:
        return frozenset(self._queues)

    @property
    def saving(self) -> frozenset[str]:
        """Models with a save that is running."""
        running = self._running.values()
        return frozenset(c.model_id for c in running if c.kind in SAVES and c.model_id is not None)

    @property
    def last_row(self) -> int:
        """The highest row number of what is queued or running, 0 when nothing is: new commands have higher ones."""
        queued = (command.n for queue in self._queues.values() for command in queue.commands())
        samples = (command.n for command in self._samples)
        return max(max(queued, default=0), max(samples, default=0), max(self._running, default=0))

    @property
    def has_work(self) -> bool:
        """Whether a turn would do anything; saves and loads are none of a turn's business."""
        heads = (self._next(model_id) for model_id in self._order)
        return bool(self._samples) or any(head is not None and head.kind not in BESIDE for head in heads)

    @property
    def waiting(self) -> int:
        """Commands queued, those that wait for an earlier number included."""
        return len(self._samples) + sum(len(queue.commands()) for queue in self._queues.values())
