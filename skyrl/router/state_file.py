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
from typing import Any, Literal

import msgspec

from skyrl.router.pool import Change, WorkerPool
from skyrl.router.worker import Worker, WorkerState

FILE_NAME = "workers.json"
SETTLE_S = 0.05
"""Changes within this time are written together."""
RETRY_S = 5.0
log = logging.getLogger(__name__)


class _Kept(msgspec.Struct, forbid_unknown_fields=True):
    """A worker in the file. `waits`: for its registration."""

    url: str
    completions_url: str | None
    worker_type: str
    labels: dict[str, Any]
    waits: bool
    disabled: str | None
    is_dead: bool
    missed: str | None

    @classmethod
    def of(cls, worker: Worker) -> _Kept:
        waits = worker.held and worker.state is WorkerState.QUARANTINED
        address = worker.url, worker.completions_url, worker.worker_type, worker.labels
        return cls(*address, waits, worker.disabled, worker.is_dead, worker.missed)


class _Registered(msgspec.Struct, forbid_unknown_fields=True):
    version: Literal[2]
    workers: list[_Kept]


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
            for kept in msgspec.convert(json.loads(content), _Registered).workers:
                worker = self._pool.add(kept.url, kept.completions_url, kept.worker_type, kept.labels)
                self._pool.set_service(worker, disabled=kept.disabled, is_dead=kept.is_dead)
                self._pool.set_missed(worker, kept.missed)
                if kept.waits:
                    worker.answers = False
                    self._pool.quarantine(worker, "before the restart it waited to be registered again")
        except (ValueError, msgspec.MsgspecError, RecursionError) as wrong:
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
        return json.dumps(msgspec.to_builtins(_Registered(2, [*map(_Kept.of, kept)])), indent=1).encode()

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
