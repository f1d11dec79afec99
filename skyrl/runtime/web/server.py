"""uvicorn as all servers of skyrl run it: bounded connections, no signal handlers of its own, no log of requests."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Generator
from typing import Any

import uvicorn

from skyrl.runtime.processes.ports import BACKLOG
from skyrl.runtime.web.connections import BoundedHttp

YOUNG_OBJECTS = 200_000
"""New objects between two garbage collections. A sample makes no cycles; with Python's default of 700 the collections
take a tenth of its time. Those of 2,048 samples in flight are fewer than this."""


class Server(uvicorn.Server):
    """Serves one ASGI application until `should_exit` is set. The caller handles signals: uvicorn's handlers would end
    the process before the caller has closed what it opened. `drain_s`: how long requests may go on after that.
    Without `date_header`, an answer has only the headers that the application gives. `http` is the class of the
    connections."""

    def __init__(self, app: Any, *, date_header: bool = True, drain_s: float = 3, http: Any = BoundedHttp) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=http,
                log_level="error",  # uvicorn would warn of every request that is not HTTP
                access_log=False,
                backlog=BACKLOG,
                timeout_keep_alive=75,
                timeout_graceful_shutdown=round(drain_s),
                server_header=False,
                date_header=date_header,
                lifespan="off",
                ws="none",
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


def tune_garbage_collection() -> None:
    """Exclude modules and services, which live until the end, from garbage collection."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, 20, 20)
