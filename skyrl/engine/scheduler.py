"""What the engine does next: each model's commands in seq_id order, tenants and their models by what they have had.

Pure bookkeeping. Does not know what a command does, nor the database.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from skyrl.engine.delayed import Delayed
from skyrl.engine.queues import ModelQueue, SampleQueue
from skyrl.engine.shares import Shares
from skyrl.types.command import Command
from skyrl.types.kinds import FILE_COMMANDS, PASSES, SAVES, Kind

BARRIER_COST = 5_000
"""What a barrier counts for in a share, in bytes: about what a pass over 250 tokens does."""
SAMPLES_AT_ONCE = 512
"""Samples that the engine runs between two turns of training, where it samples itself: enough to fill vLLM, and few
enough that training, and another tenant's samples, come soon."""


FILES_AT_ONCE = 4
"""Saves and loads that run at once: with an object store they wait for the network."""


def cost_of(command: Command) -> int:
    """What a command counts for in a share, in bytes of bodies."""
    return command.size if command.is_pass else BARRIER_COST


class Scheduler:
    """Queues per model. `budget` bounds, in bytes of bodies, what one turn takes.

    Next is the tenant that has had least, whatever number of models it has, and of its models the one that has had
    least. Whether a turn is of one model or of all together is the loop's. What was taken is running until `finish`,
    and a model with a running command has no next one.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self._queues: dict[str, ModelQueue] = {}
        self._tenants = Shares()
        self._models: defaultdict[str, Shares] = defaultdict(Shares)
        """By tenant, what each of its models has had."""
        self._files = Shares()
        """By tenant, the saves and loads that it has had."""
        self._samples = SampleQueue()
        self._samples_held = False
        self._delayed = Delayed()
        self._running: dict[int, Command] = {}
        self._busy: set[str] = set()
        self._suspects: set[str] = set()

    def suspect(self, request_ids: Collection[str]) -> None:
        """Requests that were running when the engine died: each runs before all others, and while nothing else does,
        so that if it dies again it is known by whom."""
        self._suspects |= set(request_ids)

    def open_model(self, model_id: str, next_seq: int = 0) -> None:
        if model_id not in self._queues:
            self._queues[model_id] = ModelQueue(next_seq)

    def close_model(self, model_id: str) -> list[Command]:
        """Forget a model; returns the commands that will never run."""
        queue = self._queues.pop(model_id, None)
        if queue is None:
            return []
        left = [*queue.commands(), *self._delayed.pop_model(model_id)]
        self._suspects.difference_update(command.request_id for command in left)
        return left

    def hold(self, model_id: str) -> None:
        """Its commands wait until `release`."""
        self._busy.add(model_id)

    def release(self, model_id: str) -> None:
        self._busy.discard(model_id)

    def next_seq(self, model_id: str) -> int | None:
        """The number of the first command that has not been taken; None for a model that is closed."""
        queue = self._queues.get(model_id)
        return None if queue is None else queue.next_seq

    def is_busy(self, model_id: str) -> bool:
        """Whether a command of the model runs, or it is held."""
        return model_id in self._busy

    def hold_samples(self, held: bool) -> None:
        """While they are held, samples wait: there is nobody to run them."""
        self._samples_held = held

    def add(self, command: Command) -> None:
        """Queue a command; its model is opened if it is not. One that has a time to start waits for `start_due`."""
        if command.model_id is not None:
            self.open_model(command.model_id)
        if command.kind is Kind.UNLOAD_MODEL:
            command = self._delayed.behind(command)
        if command.not_before is not None:
            self._delayed.add(command, command.not_before)
        else:
            self._queue(command)

    def start_due(self, now: float) -> None:
        """Queue what was to wait until now (seconds since the epoch)."""
        for command in self._delayed.pop(now):
            self._queue(command)

    @property
    def next_start(self) -> float | None:
        """When `start_due` has something to do, in seconds since the epoch."""
        return self._delayed.next_start

    def _queue(self, command: Command) -> None:
        if command.kind is Kind.SAMPLE:
            self._samples.add(command)
            return
        assert command.model_id is not None
        queue = self._queues[command.model_id]
        if command.kind is Kind.UNLOAD_MODEL:
            queue.unloads.append(command)
            return
        assert command.seq_id is not None
        queue.waiting[command.seq_id] = command

    def ready_models(self) -> list[str]:
        """Models that have a next command when a turn begins, the one that is next first."""
        heads = {
            m: head for m in self._queues if (head := self._next(m)) is not None and head.kind not in FILE_COMMANDS
        }
        models: defaultdict[str, list[str]] = defaultdict(list)
        for model_id, head in heads.items():
            models[head.tenant].append(model_id)
        self._tenants.compete(models)
        for tenant in self._models.keys() - models.keys():
            del self._models[tenant]
        for tenant, theirs in models.items():
            self._models[tenant].compete(theirs)
        return sorted(heads, key=lambda model_id: self._had(heads[model_id]))

    def _had(self, head: Command) -> tuple[int, int]:
        """What its tenant and its model have had: the least of these is next."""
        assert head.model_id is not None
        return self._tenants.had(head.tenant), self._models[head.tenant].had(head.model_id)

    def _charge(self, command: Command) -> None:
        assert command.model_id is not None
        self._tenants.charge(command.tenant, cost_of(command))
        self._models[command.tenant].charge(command.model_id, cost_of(command))

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
        heads = (self._head(model_id) for model_id in self._queues)
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

    def _take(self, model_id: str) -> Command:
        command = self._queues[model_id].take()
        self._charge(command)
        return command

    def take_passes(self, model_ids: Sequence[str]) -> list[Command]:
        """The next batch of passes of these models, each model's in order and up to its next barrier: as many as the
        budget is for, and at least one."""
        candidates = self._heads(self._of_kinds(model_ids, lambda head: head.is_pass))
        batch: list[Command] = []
        used = 0
        while candidates:
            model_id = self._first(candidates)
            used += candidates[model_id].size
            if batch and used > self.budget:
                break
            batch.append(self._take(model_id))
            head = self._queues[model_id].head()
            if head is not None and head.is_pass and self._together(batch[-1], head):
                candidates[model_id] = head
            else:
                del candidates[model_id]
        return self._run(batch)

    def take_barriers(self, model_ids: Sequence[str]) -> list[Command]:
        """One command of each of these models whose next one is neither a pass nor a save nor a load: as many as the
        budget is for, and at least one."""
        kinds = PASSES | FILE_COMMANDS
        candidates = self._heads(self._of_kinds(model_ids, lambda head: head.kind not in kinds))
        batch: list[Command] = []
        while candidates and len(batch) * BARRIER_COST <= self.budget:
            model_id = self._first(candidates)
            del candidates[model_id]
            batch.append(self._take(model_id))
        return self._run(batch)

    def _first(self, candidates: Mapping[str, Command]) -> str:
        """Of these models with their next commands, the one that is next."""
        return min(candidates, key=lambda model_id: self._had(candidates[model_id]))

    def _heads(self, model_ids: Iterable[str]) -> dict[str, Command]:
        heads = ((model_id, self._queues[model_id].head()) for model_id in model_ids)
        return {model_id: head for model_id, head in heads if head is not None}

    def take_file_commands(self) -> list[Command]:
        """Saves and loads that may run now: one command of a model, up to FILES_AT_ONCE with those that run.

        Next is the tenant that has had fewest, and of its commands the one that came first. They count in the tenant's
        share of training too, as a step does. That share does not order them: who trains much would wait for all saves
        of one who only saves.
        """
        free = FILES_AT_ONCE - sum(command.kind in FILE_COMMANDS for command in self._running.values())
        if free <= 0:
            return []
        heads = self._heads(self._of_kinds(self._queues, lambda head: head.kind in FILE_COMMANDS))
        self._files.compete({head.tenant for head in heads.values()})
        taken: list[Command] = []
        while heads and len(taken) < free:
            model_id = min(heads, key=lambda model: (self._files.had(heads[model].tenant), heads[model].n))
            tenant = heads.pop(model_id).tenant
            self._files.charge(tenant, 1)
            taken.append(self._take(model_id))
        return self._run(taken)

    def take_samples(self) -> list[Command]:
        """Up to SAMPLES_AT_ONCE, as many of each tenant as there are."""
        return [] if self._samples_held else self._run(self._samples.take(SAMPLES_AT_ONCE))

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
        running = max(self._running, default=0)
        return max(max(queued, default=0), self._samples.last_row, running, self._delayed.last_row)

    @property
    def has_work(self) -> bool:
        """Whether a turn would do anything; saves and loads are none of a turn's business."""
        heads = (self._next(model_id) for model_id in self._queues)
        samples = bool(self._samples) and not self._samples_held
        return samples or any(head is not None and head.kind not in FILE_COMMANDS for head in heads)

    @property
    def waiting(self) -> int:
        """Commands queued, those that wait for an earlier number or for their time included."""
        return len(self._delayed) + len(self._samples) + sum(len(queue.commands()) for queue in self._queues.values())
