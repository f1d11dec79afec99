"""The registered workers on disk, so that a router that starts again knows them.

The file holds addresses, labels, and what operators have set. Health is not kept, except that a worker which waited for
its registration still waits. Write errors are logged: a router without a disk goes on.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from skyrl.router.pool import Change, WorkerPool
from skyrl.router.worker import Worker, WorkerState

FILE_NAME = "workers.json"
SETTLE_S = 0.05
"""Changes within this time are written together."""
RETRY_S = 5.0
_VERSION = 2
_SERVICE: dict[str, Any] = {"disabled": None, "is_dead": False, "missed": None}
"""What version 1 did not have."""

log = logging.getLogger(__name__)


class StateFile:
    """`directory` is made if it is missing."""

    def __init__(self, directory: Path, pool: WorkerPool) -> None:
        self.path = directory / FILE_NAME
        self._pool = pool
        self._dirty = asyncio.Event()
        pool.subscribe(self._note)

    def load(self) -> None:
        """Register the workers of the file. A broken file is moved aside. Blocks: call this before the router
        serves. Raises OSError if the directory cannot be used."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            content = self.path.read_bytes()
        except FileNotFoundError:
            return
        try:
            for registered in _parse(content):
                waits = registered.pop("waits")
                service = {name: registered.pop(name) for name in _SERVICE}
                worker = self._pool.add(**registered)
                self._pool.set_service(worker, disabled=service["disabled"], is_dead=service["is_dead"])
                self._pool.set_missed(worker, service["missed"])
                if waits:
                    worker.answers = False
                    self._pool.quarantine(worker, "before the restart it waited to be registered again")
        except (ValueError, RecursionError) as wrong:
            aside = self.path.with_suffix(".broken.json")
            os.replace(self.path, aside)
            log.warning("%s is broken (%s); moved to %s", self.path, wrong, aside)

    async def run(self) -> None:
        """Write each change until this task is cancelled; then write the last one."""
        try:
            while True:
                await self._dirty.wait()
                await asyncio.sleep(SETTLE_S)
                self._dirty.clear()
                writing = asyncio.ensure_future(asyncio.to_thread(self._write, self._content()))
                try:
                    written = await asyncio.shield(writing)
                except asyncio.CancelledError:
                    await writing  # the last write must not meet this one
                    raise
                if not written:
                    self._dirty.set()
                    await asyncio.sleep(RETRY_S)
        finally:
            if self._dirty.is_set():
                self._write(self._content())

    def _note(self, worker: Worker, change: Change) -> None:
        if change not in (Change.PROBED, Change.HELD):
            self._dirty.set()

    def _content(self) -> bytes:
        kept = [worker for worker in self._pool.workers if worker.state is not WorkerState.DRAINING]
        return json.dumps({"version": _VERSION, "workers": [*map(_stored, kept)]}, indent=1).encode()

    def _write(self, content: bytes) -> bool:
        temporary = self.path.with_suffix(".tmp")
        try:
            with open(temporary, "wb") as stream:
                stream.write(content)
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(temporary, self.path)
        except OSError as error:
            log.warning("%s cannot be written: %s", self.path, error)
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            return False
        return True


def _stored(worker: Worker) -> dict[str, Any]:
    return {
        "url": worker.url,
        "completions_url": worker.completions_url,
        "worker_type": worker.worker_type,
        "labels": worker.labels,
        "waits": worker.held and worker.state is WorkerState.QUARANTINED,
        "disabled": worker.disabled,
        "is_dead": worker.is_dead,
        "missed": worker.missed,
    }


def _parse(content: bytes) -> list[dict[str, Any]]:
    """The arguments of each worker's registration, and `waits`. Raises ValueError."""
    state = json.loads(content)
    if not isinstance(state, dict) or state.get("version") not in (1, _VERSION):
        raise ValueError(f"no state of version {_VERSION}")
    if not isinstance(state.get("workers"), list):
        raise ValueError("no list of workers")
    if state["version"] == 1:
        state["workers"] = [_SERVICE | worker if isinstance(worker, dict) else worker for worker in state["workers"]]
    for worker in state["workers"]:
        if not isinstance(worker, dict) or worker.keys() != _TYPES.keys():
            raise ValueError("a worker does not have the fields of a worker")
        if wrong := [name for name, kind in _TYPES.items() if not isinstance(worker[name], kind)]:
            raise ValueError(f"{wrong[0]} of a worker has the wrong type")
    return state["workers"]


_TYPES: dict[str, Any] = {
    "url": str,
    "completions_url": str | None,
    "worker_type": str,
    "labels": dict,
    "waits": bool,
    "disabled": str | None,
    "is_dead": bool,
    "missed": str | None,
}
