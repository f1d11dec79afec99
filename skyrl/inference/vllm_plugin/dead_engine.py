"""Ends vLLM's API server soon after its engine has died, so that its supervisor starts both again.

After such a death vLLM fails the requests in flight and exits, but it waits for all requests first. A request that the
engine will never answer, for example to load an adapter, then keeps a server without an engine for ever.

Knows how vLLM watches its engine's processes. Knows nothing of requests.
"""

from __future__ import annotations

import os
import time
from multiprocessing import connection
from threading import Thread
from typing import Any

from vllm.v1.engine.core_client import MPClient

ANSWERS_WITHIN_S = 1.5
"""The time that the API server has to tell its clients that the engine is dead."""
NOTED_WITHIN_S = 5.0
"""vLLM's own watch notes within a second whether an engine's end was asked for."""


def exit_with_engine() -> None:
    """Patch this process. A second call changes nothing."""
    original = MPClient.start_engine_core_monitor
    if original.__module__ == __name__:
        return

    def start_engine_core_monitor(client: Any) -> None:
        original(client)
        manager = client.resources.engine_manager
        if getattr(manager, "processes", None):  # an engine in a Ray cluster has none on this machine
            Thread(target=_watch, args=(manager,), daemon=True, name="skyrl-dead-engine").start()

    MPClient.start_engine_core_monitor = start_engine_core_monitor  # type: ignore[method-assign]


def _watch(manager: Any) -> None:
    """Wait until a process of the engine has ended. Exit if its end was not asked for."""
    connection.wait([process.sentinel for process in manager.processes])
    ended = time.monotonic()
    manager.manager_stopped.wait(NOTED_WITHIN_S)
    if manager.failed_proc_name is not None:
        time.sleep(max(0.0, ended + ANSWERS_WITHIN_S - time.monotonic()))
        os._exit(1)
