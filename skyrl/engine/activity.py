"""What the engine does now, and how the API processes learn of it: by a heartbeat, which also says that the engine
lives.

`ActivityWatch` looks at the scheduler every few seconds. It reads the scheduler and the inference servers' states, and
changes nothing. `skyrl.api.request_status` puts the activity into words.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable

from skyrl.base.types.activity import (
    MAX_MODELS,
    EngineActivity,
    ModelActivity,
    RecoveryProgress,
    WaitsFor,
    encode_activity,
)
from skyrl.engine.metrics import CommandMetrics, RunTimes
from skyrl.engine.queues import ModelView
from skyrl.engine.scheduler import Scheduler
from skyrl.storage.db.engine_publisher import EngineStatePublisher
from skyrl.storage.db.faults import DatabaseError
from skyrl.storage.db.repeats import Rounds

LOOK_S = 1.0
"""How often the scheduler is looked at. A wait is known to have begun up to LOOK_S late."""


class Holds:
    """Why recovery holds models, and how far it is. Recovery writes here; `ActivityWatch` reads."""

    def __init__(self) -> None:
        self.progress: RecoveryProgress | None = None
        """Set while models are being restored."""
        self.models: set[str] = set()
        """The models that are not restored yet."""
        self.reasons: dict[str, WaitsFor] = {}
        """By id, the models that recovery holds longer: for the checkpoint store, or for memory."""

    def begin(self, commands: int) -> None:
        """So many more commands will be repeated."""
        before = self.progress or RecoveryProgress(0, 0)
        self.progress = RecoveryProgress(before.repeated, before.commands + commands)

    def repeated(self) -> None:
        if (progress := self.progress) is not None:
            self.progress = RecoveryProgress(progress.repeated + 1, max(progress.commands, progress.repeated + 1))

    def end(self) -> None:
        self.progress = None


class ActivityWatch:
    """`inference_ready` returns whether an inference server is ready; None where skyrl runs none."""

    def __init__(
        self,
        scheduler: Scheduler,
        run_times: RunTimes,
        holds: Holds,
        inference_ready: Callable[[], bool] | None,
        metrics: CommandMetrics,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._scheduler = scheduler
        self._run_times = run_times
        self._holds = holds
        self._inference_ready = inference_ready
        self._metrics = metrics
        self._clock = clock
        self._inference_away_since: float | None = None
        self.now = EngineActivity()
        """The activity at the last look."""

    @property
    def text(self) -> str:
        """The activity at the last look, encoded. Any thread may read it."""
        return encode_activity(self.now)

    async def run(self) -> None:
        """Look every LOOK_S seconds until cancelled."""
        while True:
            self.look()
            await asyncio.sleep(LOOK_S)

    def look(self) -> None:
        """Must be called on the event loop, which alone changes the scheduler."""
        now = self._clock()
        models = {model_id: self._model(model_id, view, now) for model_id, view in self._scheduler.views().items()}
        counts: Counter[WaitsFor] = Counter()
        for model in models.values():
            counts[model.waits_for] += model.waiting
        self._metrics.waiting(counts)
        if len(models) > MAX_MODELS:
            longest = sorted(models.items(), key=lambda item: item[1].since)
            models = dict(longest[:MAX_MODELS])
        self.now = EngineActivity(
            models,
            self._holds.progress,
            self._scheduler.samples_waiting,
            self._inference_away(now),
            self._run_times.means(),
        )

    def _inference_away(self, now: float) -> float | None:
        if self._inference_ready is None or self._inference_ready():
            self._inference_away_since = None
        elif self._inference_away_since is None:
            self._inference_away_since = now
        return self._inference_away_since

    def _model(self, model_id: str, view: ModelView, now: float) -> ModelActivity:
        waits_for = self._waits_for(model_id, view)
        next_command = view.running[-1] if view.running else view.head
        starts_at = None
        if next_command is None and waits_for is WaitsFor.QUOTA:
            starts_at, next_command = min(view.delayed, key=lambda delayed: delayed[0])
        commands = view.commands
        kind = commands[0].kind if next_command is None else next_command.kind
        seq_id = view.next_seq if next_command is None else next_command.seq_id
        before = self.now.models.get(model_id)
        same = before is not None and (before.waits_for, before.seq_id) == (waits_for, seq_id)
        return ModelActivity(
            tenant=commands[0].tenant,
            waits_for=waits_for,
            since=before.since if before is not None and same else now,
            kind=str(kind),
            seq_id=seq_id,
            waiting=len(commands) - len(view.running),
            work_s=self._run_times.total(commands),
            starts_at=starts_at,
        )

    def _waits_for(self, model_id: str, view: ModelView) -> WaitsFor:
        if view.running:
            return WaitsFor.NOTHING
        if (reason := self._holds.reasons.get(model_id)) is not None:
            return reason
        if model_id in self._holds.models:
            return WaitsFor.RECOVERY
        if view.head is not None:
            return WaitsFor.TURN
        return WaitsFor.QUOTA if view.missing is None else WaitsFor.GAP


HEARTBEAT_S = 3.0


class Heartbeat:
    """Publishes a heartbeat from its own thread, so that an engine in a long step does not look dead."""

    def __init__(self, state: EngineStatePublisher) -> None:
        self._state = state
        self.activity: Callable[[], str] = lambda: encode_activity(EngineActivity())
        """What the engine does now. Called on the thread."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        rounds = Rounds("the engine's heartbeat", HEARTBEAT_S)
        while not self._stop.wait(HEARTBEAT_S):
            try:
                self._state.beat(self.activity())
            except DatabaseError as error:
                rounds.failed(error)
            else:
                rounds.went_well()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()
