"""The engine's heartbeat: tells the API processes that the engine lives, and what it does."""

from __future__ import annotations

import threading
from collections.abc import Callable

from skyrl.base.types.activity import EngineActivity, encode_activity
from skyrl.storage.db.engine_publisher import EngineStatePublisher
from skyrl.storage.db.faults import DatabaseError
from skyrl.storage.db.repeats import Rounds

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
