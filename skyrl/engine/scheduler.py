"""Which commands run next: a model's commands in the order of their seq_id, tenants and models by fair shares.

Pure bookkeeping. Knows neither what a command does nor the database.
"""

from __future__ import annotations

import contextlib
import heapq
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from skyrl.base.types.requests import FILE_COMMANDS, PASSES, SAVES, Command, Kind
from skyrl.engine.queues import Delayed, ModelQueue, ModelView, SampleQueue, Shares

EXCLUSIVE_COST = 5_000
"""The cost of an exclusive command in a share, in bytes: about the cost of a pass over 250 tokens."""
STEP_SHARES = 8
"""A step counts as at most so many shares when its turn is chosen, so that a large step is not put off for longer."""
SAMPLES_AT_ONCE = 512
"""How many samples a colocated engine runs between two turns of training: enough to fill vLLM, and few enough that
training and other tenants' samples come soon."""
FILES_AT_ONCE = 4
"""How many saves and loads run at a time. With an object store they mostly wait for the network."""


def cost_of(command: Command) -> int:
    """The cost of a command in a share, in bytes of bodies."""
    return command.size if command.is_pass else EXCLUSIVE_COST


def _may_interrupt(head: Command) -> bool:
    """Whether the command may run between two micro-batches of another model's pass: others come and go with a model,
    for which the event loop waits."""
    return head.is_pass or head.kind is Kind.OPTIM_STEP


class Scheduler:
    """One queue per model. `budget` bounds the cost of one turn, in bytes of bodies.

    A share is a turn's budget. A model's step is what has arrived of its passes up to its next exclusive command. The
    next tenant is the tenant that will have had least when its next step has ended, however many models it has; its
    next step is that of the model that will then have had least. So of equal steps the one that has begun goes on, and
    a small step goes before the rest of a large one. A tenant that waits is at most STEP_SHARES shares and one turn
    behind another.

    The loop decides whether a turn runs one model or all models. A command runs from the moment it is taken until
    `finish`; meanwhile its model has no next command.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self._queues: dict[str, ModelQueue] = {}
        self._tenants = Shares()
        self._models: defaultdict[str, Shares] = defaultdict(Shares)
        """By tenant, the cost so far of each of the tenant's models."""
        self._files = Shares()
        """The number of saves and loads of each tenant so far."""
        self._samples = SampleQueue()
        self._samples_held = False
        self._delayed = Delayed()
        self._running: dict[int, Command] = {}
        self._busy: set[str] = set()
        self._suspects: set[str] = set()
        self._repeating = 0
        """How many commands of models that are being restored run now."""

    def suspect(self, request_ids: Collection[str]) -> None:
        """These requests were running when the engine died. Run each before all other commands, and alone: if the
        engine dies again, the request that was running is the cause."""
        self._suspects |= set(request_ids)

    @contextlib.contextmanager
    def repeating(self) -> Iterator[None]:
        """A command of a model that is being restored runs, beside which no suspect may begin."""
        self._repeating += 1
        try:
            yield
        finally:
            self._repeating -= 1

    @property
    def suspect_is_due(self) -> bool:
        """Whether a suspect runs, or is the next command of a model that is not held."""
        if not self._suspects:
            return False
        heads = (self._head(model_id) for model_id in self._queues)
        commands = (*self._running.values(), *(head for head in heads if head is not None))
        return any(command.request_id in self._suspects for command in commands)

    def open_model(self, model_id: str, next_seq: int = 0) -> None:
        if model_id not in self._queues:
            self._queues[model_id] = ModelQueue(next_seq)

    def close_model(self, model_id: str) -> list[Command]:
        """Forget a model. Returns its waiting commands, which will never run."""
        queue = self._queues.pop(model_id, None)
        if queue is None:
            return []
        waiting = [*queue.commands(), *self._delayed.pop_model(model_id)]
        self._suspects.difference_update(command.request_id for command in waiting)
        return waiting

    def give_up(self, model_id: str) -> list[Command]:
        """Wait no longer for the model's missing number. Returns the commands that have waited for it, in their order;
        they will never run, and the model goes on with the number after them."""
        queue, delayed = self._queues[model_id], self._delayed.pop_model(model_id)
        numbers = [*queue.waiting, *(command.seq_id for command in delayed if command.seq_id is not None)]
        given_up = [*queue.skip_to(max(numbers) + 1), *delayed]
        self._suspects.difference_update(command.request_id for command in given_up)
        return sorted(given_up, key=lambda command: command.seq_id or 0)

    def hold(self, model_id: str) -> None:
        """The model's commands wait until `release`."""
        self._busy.add(model_id)

    def release(self, model_id: str) -> None:
        self._busy.discard(model_id)

    def next_seq(self, model_id: str) -> int | None:
        """The seq_id of the model's next command to take; None for a closed model."""
        queue = self._queues.get(model_id)
        return None if queue is None else queue.next_seq

    def is_late(self, command: Command) -> bool:
        """Whether commands with higher numbers of the model have run or failed, so that this one must not run."""
        next_seq = None if command.model_id is None else self.next_seq(command.model_id)
        return next_seq is not None and command.seq_id is not None and command.seq_id < next_seq

    def is_busy(self, model_id: str) -> bool:
        """Whether a command of the model runs, or the model is held."""
        return model_id in self._busy

    def hold_samples(self, held: bool) -> None:
        """While `held`, samples wait: the sampler cannot run them now."""
        self._samples_held = held

    def add(self, command: Command) -> None:
        """Queue a command; open its model if the model is not open. A delayed command waits for `start_due`."""
        if command.model_id is not None:
            self.open_model(command.model_id)
        if command.kind is Kind.UNLOAD_MODEL:
            command = self._delayed.start_after_delayed(command)
        if command.not_before is not None:
            self._delayed.add(command, command.not_before)
        else:
            self._queue(command)

    def start_due(self, now: float) -> None:
        """Queue the delayed commands that may start now (`now` is in seconds since the epoch)."""
        for command in self._delayed.pop(now):
            self._queue(command)

    @property
    def next_start(self) -> float | None:
        """When the next delayed command may start, in seconds since the epoch; None if none is delayed."""
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
        queue.add(command)

    def ready_models(self) -> list[str]:
        """Models whose next command runs in a turn (is no save and no load). The model that is next comes first."""
        heads = {
            m: head
            for m in self._queues
            if (head := self._runnable_head(m)) is not None and head.kind not in FILE_COMMANDS
        }
        models: defaultdict[str, list[str]] = defaultdict(list)
        for model_id, head in heads.items():
            models[head.tenant].append(model_id)
        self._tenants.compete(models)
        for tenant in self._models.keys() - models.keys():
            del self._models[tenant]
        for tenant, model_ids in models.items():
            self._models[tenant].compete(model_ids)
        first = next(self._in_order(heads), None)
        return sorted(heads, key=lambda model_id: model_id != first)

    def _runnable_head(self, model_id: str) -> Command | None:
        head = self._head(model_id)
        return None if head is None or (self._suspects and not self._may_run(head)) else head

    def _head(self, model_id: str) -> Command | None:
        queue = self._queues.get(model_id)
        return None if queue is None or model_id in self._busy else queue.head()

    def _may_run(self, head: Command) -> bool:
        """A suspect runs once no other command runs. Other commands wait for running and for runnable suspects."""
        if head.request_id in self._suspects:
            return not self._running and not self._repeating
        heads = (self._head(model_id) for model_id in self._queues)
        due = any(other is not None and other.request_id in self._suspects for other in heads)
        return not due and not any(command.request_id in self._suspects for command in self._running.values())

    def _models_whose_head(self, model_ids: Iterable[str], wanted: Callable[[Command], bool]) -> list[str]:
        """The models whose next command is `wanted`. Only the first model if its next command is a suspect."""
        ready = [m for m in model_ids if (head := self._runnable_head(m)) is not None and wanted(head)]
        suspect_first = ready and (head := self._head(ready[0])) is not None and head.request_id in self._suspects
        return ready[:1] if suspect_first else ready

    def _may_share_batch(self, taken: Command, head: Command) -> bool:
        """Whether the passes `taken` and `head` may run in one batch: neither is a suspect."""
        return self._suspects.isdisjoint((taken.request_id, head.request_id))

    def _mark_running(self, commands: list[Command]) -> list[Command]:
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
        self._tenants.charge(command.tenant, cost_of(command))
        self._models[command.tenant].charge(model_id, cost_of(command))
        return command

    def take_passes(self, model_ids: Sequence[str]) -> list[Command]:
        """The next batch of passes of these models: as many as fit the budget, and at least one if any is ready. Each
        model's passes come in order, up to the model's next exclusive command."""
        candidates = self._heads_of(self._models_whose_head(model_ids, lambda head: head.is_pass))
        batch: list[Command] = []
        used = 0
        for model_id in self._in_order(candidates):
            used += candidates[model_id].size
            if batch and used > self.budget:
                break
            batch.append(self._take(model_id))
            head = self._queues[model_id].head()
            if head is not None and head.is_pass and self._may_share_batch(batch[-1], head):
                candidates[model_id] = head
            else:
                del candidates[model_id]
        return self._mark_running(batch)

    def take_exclusive(self, model_ids: Sequence[str]) -> list[Command]:
        """The next command of each of these models, except passes, saves and loads: as many as fit the budget, and at
        least one if any is ready."""
        kinds = PASSES | FILE_COMMANDS
        candidates = self._heads_of(self._models_whose_head(model_ids, lambda head: head.kind not in kinds))
        batch: list[Command] = []
        for model_id in self._in_order(candidates):
            if batch and (len(batch) + 1) * EXCLUSIVE_COST > self.budget:
                break
            del candidates[model_id]
            batch.append(self._take(model_id))
        return self._mark_running(batch)

    def take_before(self, running: Sequence[Command]) -> list[Command]:
        """What goes before the rest of `running`, passes that have begun: the passes up to the budget, or the optimizer
        step, of the tenant that is next. Only if this tenant's step ends with less than the steps of `running`: their
        passes count as a whole, and the rest of their steps as at most STEP_SHARES shares. Nothing of their own
        tenants does, and nothing at all if samples wait, or if what is next must wait for the turn to end."""
        tenants = {command.tenant for command in running}
        heads = {model_id: head for model_id in self._queues if (head := self._runnable_head(model_id)) is not None}
        others = [m for m, head in heads.items() if head.kind not in FILE_COMMANDS and head.tenant not in tenants]
        order = [self._cost_at_end(heads[model_id].tenant, [model_id]) for model_id in others]
        if self._samples_wait or not order or min(order)[0] >= min(map(self._cost_of_begun, running)):
            return []
        head = heads[model_id := min(order)[2]]
        if not _may_interrupt(head):
            return []
        return self.take_passes([model_id]) if head.is_pass else self.take_exclusive([model_id])

    def _cost_of_begun(self, command: Command) -> int:
        """What a tenant will have had when the step of this pass has ended."""
        queue = None if command.model_id is None else self._queues.get(command.model_id)
        rest = 0 if queue is None else min(queue.step_size, STEP_SHARES * self.budget)
        return self._tenants.amount(command.tenant) + rest

    def _in_order(self, heads: Mapping[str, Command]) -> Iterator[str]:
        """The model that is next, again and again until `heads` is empty. `heads` has each model's next command. For
        each model the caller may take this command, and then changes or deletes its entry in `heads`."""
        tenants: defaultdict[str, list[str]] = defaultdict(list)
        for model_id, head in heads.items():
            tenants[head.tenant].append(model_id)
        order = [self._cost_at_end(tenant, own) for tenant, own in tenants.items()]
        heapq.heapify(order)
        while order:
            *_, model_id, tenant = order[0]
            yield model_id
            if own := [model_id for model_id in tenants[tenant] if model_id in heads]:
                heapq.heapreplace(order, self._cost_at_end(tenant, own))
            else:
                heapq.heappop(order)

    def _cost_at_end(self, tenant: str, model_ids: Sequence[str]) -> tuple[int, int, str, str]:
        """Of a tenant with these ready models: its cost at the end of its next step, what is left of this step, the
        step's model, and the tenant. The smallest is next: of equal steps the one of which the least is left."""
        models, most = self._models[tenant], STEP_SHARES * self.budget
        left = {model_id: min(self._queues[model_id].step_size, most) for model_id in model_ids}
        _, rest, model_id = min((models.amount(model_id) + rest, rest, model_id) for model_id, rest in left.items())
        return self._tenants.amount(tenant) + rest, rest, model_id, tenant

    def _heads_of(self, model_ids: Iterable[str]) -> dict[str, Command]:
        heads = ((model_id, self._queues[model_id].head()) for model_id in model_ids)
        return {model_id: head for model_id, head in heads if head is not None}

    def take_file_commands(self) -> list[Command]:
        """Take saves and loads that may run now: one per model, and so many that at most FILES_AT_ONCE run. One of
        these places is for saves for sampling, which mostly need no checkpoint store: one that hangs must not stop
        them.

        The tenant with the fewest saves and loads so far is next; its earliest command is taken. These commands also
        count in the tenant's share of training, as a step does. The share of training does not order them: otherwise a
        tenant that trains much would wait for all saves of a tenant that only saves.
        """
        running = [command.kind for command in self._running.values() if command.kind in FILE_COMMANDS]
        free = FILES_AT_ONCE - len(running)
        free_for_store = FILES_AT_ONCE - 1 - sum(kind is not Kind.SAVE_WEIGHTS_FOR_SAMPLER for kind in running)
        if free <= 0:
            return []
        heads = self._heads_of(self._models_whose_head(self._queues, lambda head: head.kind in FILE_COMMANDS))
        self._files.compete({head.tenant for head in heads.values()})
        taken: list[Command] = []
        while heads and len(taken) < free:
            model_id = min(heads, key=lambda model: (self._files.amount(heads[model].tenant), heads[model].n))
            head = heads.pop(model_id)
            if head.kind is not Kind.SAVE_WEIGHTS_FOR_SAMPLER:
                if free_for_store <= 0:
                    continue
                free_for_store -= 1
            self._files.charge(head.tenant, 1)
            taken.append(self._take(model_id))
        return self._mark_running(taken)

    def take_samples(self) -> list[Command]:
        """Up to SAMPLES_AT_ONCE samples, taken from the tenants in turn."""
        return [] if self._samples_held else self._mark_running(self._samples.take(SAMPLES_AT_ONCE))

    def __contains__(self, model_id: str) -> bool:
        return model_id in self._queues

    @property
    def model_ids(self) -> frozenset[str]:
        return frozenset(self._queues)

    def views(self) -> dict[str, ModelView]:
        """The models with commands, by id: what of each waits, is delayed, and runs."""
        views = {
            model_id: ModelView(
                queue.next_seq, head=queue.head(), waiting=queue.commands(), held=model_id in self._busy
            )
            for model_id, queue in self._queues.items()
        }
        for start, command in self._delayed.commands():
            if command.model_id is not None and (view := views.get(command.model_id)) is not None:
                view.delayed.append((start, command))
        for command in self._running.values():
            if command.model_id is not None and (view := views.get(command.model_id)) is not None:
                view.running.append(command)
        return {model_id: view for model_id, view in views.items() if view.has_commands}

    @property
    def samples_waiting(self) -> int:
        """Samples that wait for the engine."""
        return len(self._samples)

    @property
    def saving(self) -> frozenset[str]:
        """Models with a running save. Any thread may ask."""
        running = list(self._running.values())
        return frozenset(c.model_id for c in running if c.kind in SAVES and c.model_id is not None)

    @property
    def last_row(self) -> int:
        """The highest row number of all waiting and running commands; 0 if there is none. New commands have higher
        numbers."""
        queued = (command.n for queue in self._queues.values() for command in queue.commands())
        running = max(self._running, default=0)
        return max(max(queued, default=0), self._samples.last_row, running, self._delayed.last_row)

    @property
    def _samples_wait(self) -> bool:
        return bool(self._samples) and not self._samples_held

    @property
    def has_work(self) -> bool:
        """Whether a turn would run any command. Saves and loads do not count: they run outside of turns."""
        heads = (self._runnable_head(model_id) for model_id in self._queues)
        return self._samples_wait or any(head is not None and head.kind not in FILE_COMMANDS for head in heads)

    @property
    def oldest(self) -> float | None:
        """When the oldest command was accepted that runs or could run now, in seconds since the epoch."""
        heads = (self._runnable_head(model_id) for model_id in self._queues)
        commands = [*self._running.values(), *(head for head in heads if head is not None)]
        return min((command.accepted_at for command in commands), default=None)

    @property
    def waiting(self) -> int:
        """The number of waiting commands, including delayed commands and commands that wait for an earlier seq_id."""
        return len(self._delayed) + len(self._samples) + sum(len(queue.commands()) for queue in self._queues.values())
