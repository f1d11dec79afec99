"""Checks pictures one after the other in a worker process, seen from the process that asks.

`PictureChecker` has the queue, and decides when a worker is replaced. `Decoder` starts one worker, asks it and ends it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

import msgspec

from skyrl.base.pictures.picture import FORMATS, BadPicture, PictureFormat
from skyrl.runtime.pictures import HEADER, Limits
from skyrl.runtime.processes.supervision import exit_code

START_S = 60.0
_PIECE_BYTES = 2**18
"""The event loop serves others between the pieces of a file."""
_ENVIRONMENT = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL")
"""All that the worker inherits. It decodes files of strangers, so it gets no secrets."""


class WorkerDied(Exception):
    """The worker ended before it answered."""


class Decoder:
    """A worker process. It decodes one file at a time."""

    def __init__(
        self, limits: Limits, child: subprocess.Popen[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._limits, self._child, self._reader, self._writer = limits, child, reader, writer
        self.is_idle = False
        """Whether the worker has answered everything. One that is not idle can only be ended."""

    @classmethod
    async def start(cls, limits: Limits) -> Self:
        """Start a worker and wait until it is ready. Raises OSError, TimeoutError or WorkerDied."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                child = _spawn(limits, theirs)
        except BaseException:
            ours.close()
            raise
        decoder = cls(limits, child, *await asyncio.open_connection(sock=ours))
        try:
            async with asyncio.timeout(START_S):
                await decoder._answer()
        except BaseException:
            await decoder.end()
            raise
        return decoder

    @property
    def pid(self) -> int:
        return self._child.pid

    async def size_of(self, data: bytes, format: PictureFormat) -> tuple[int, int]:
        """Width and height of the decoded picture. Raises BadPicture, also if the picture takes too much time; raises
        WorkerDied if the worker ended for another reason."""
        self.is_idle = False
        try:
            async with asyncio.timeout(self._limits.wall_s):
                await self._send(data, format)
                answer = await self._answer()
        except TimeoutError:
            raise BadPicture(f"takes more than {self._limits.wall_s:g} s to decode") from None
        except (OSError, WorkerDied) as error:
            code = await self.end()
            if code == -signal.SIGPROF:
                raise BadPicture(f"takes more than {self._limits.cpu_s:g} s to decode") from None
            raise WorkerDied(f"the worker that decodes pictures ended with {code}") from error
        if "bad" in answer:
            raise BadPicture(answer["bad"])
        width, height = answer["size"]
        return width, height

    async def end(self) -> int:
        """Kill the worker, if it still runs, and reap it. Returns its exit code; negative is a signal."""
        self.is_idle = False
        self._writer.transport.abort()
        self._child.kill()
        return await exit_code(self._child)

    async def _send(self, data: bytes, format: PictureFormat) -> None:
        self._writer.write(HEADER.pack(FORMATS.index(format), len(data)))
        view = memoryview(data)
        for start in range(0, len(data), _PIECE_BYTES):
            self._writer.write(view[start : start + _PIECE_BYTES])
            await self._writer.drain()

    async def _answer(self) -> dict[str, Any]:
        line = await self._reader.readline()
        if not line.endswith(b"\n"):
            raise WorkerDied
        self.is_idle = True
        return msgspec.json.decode(line)


def _spawn(limits: Limits, connection: socket.socket) -> subprocess.Popen[bytes]:
    """The worker inherits no other descriptor than `connection`, as its input and output, and the error output."""
    numbers = (limits.cpu_s, limits.memory_bytes, limits.nice)
    return subprocess.Popen(
        (sys.executable, "-P", "-m", "skyrl.runtime.pictures.worker", *map(str, numbers)),
        stdin=connection.fileno(),
        stdout=connection.fileno(),
        env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
    )


MAX_WAITING = 256
"""Pictures that wait or are decoded."""
MAX_WAITING_BYTES = 256 * 2**20
TRIES = 2
"""A worker may be killed for a reason that is not the picture, so a picture has a second try."""


class TooManyPictures(Exception):
    """The queue is full. `retry_after_s`: when the client may send the picture again."""

    retry_after_s = 2


class NotChecked(Exception):
    """No worker could be started. Says nothing about the picture."""


class PictureChecker:
    """Starts its worker at the first picture; `close` ends it."""

    def __init__(
        self,
        limits: Limits | None = None,
        *,
        max_waiting: int = MAX_WAITING,
        max_waiting_bytes: int = MAX_WAITING_BYTES,
    ) -> None:
        self._limits = limits or Limits()
        self._max_waiting, self._max_waiting_bytes = max_waiting, max_waiting_bytes
        self._waiting = self._waiting_bytes = 0
        self._turn = asyncio.Lock()
        self._decoder: Decoder | None = None
        self._is_closed = False

    @property
    def worker_pid(self) -> int | None:
        """Of the worker that runs, if one does."""
        return None if self._decoder is None else self._decoder.pid

    async def check(self, data: bytes, format: PictureFormat) -> tuple[int, int]:
        """Decode the entire file. Returns width and height in pixels, after the rotation that EXIF asks for. Raises
        BadPicture, TooManyPictures or NotChecked."""
        with self._place(len(data)):
            async with self._turn:
                for _ in range(TRIES):
                    decoder = await self._ready()
                    try:
                        return await decoder.size_of(data, format)
                    except WorkerDied:
                        continue
                    finally:
                        if not decoder.is_idle:
                            await self._end()
        raise BadPicture("ends the process that decodes it")

    async def close(self) -> None:
        """End the worker. Checks that still wait fail with NotChecked. May be called twice."""
        self._is_closed = True
        await self._end()
        async with self._turn:  # a worker that was starting
            await self._end()

    @contextmanager
    def _place(self, size: int) -> Iterator[None]:
        """In the queue. Raises TooManyPictures."""
        if self._waiting >= self._max_waiting or self._waiting_bytes + size > self._max_waiting_bytes:
            raise TooManyPictures(f"{self._waiting} pictures wait to be checked; try again later")
        self._waiting += 1
        self._waiting_bytes += size
        try:
            yield
        finally:
            self._waiting -= 1
            self._waiting_bytes -= size

    async def _ready(self) -> Decoder:
        if self._is_closed:
            raise NotChecked("the checker of pictures is closed")
        if self._decoder is None:
            try:
                self._decoder = await Decoder.start(self._limits)
            except (OSError, TimeoutError, WorkerDied) as error:
                raise NotChecked(f"the worker that decodes pictures did not start: {error}") from error
        return self._decoder

    async def _end(self) -> None:
        decoder, self._decoder = self._decoder, None
        if decoder is not None:
            await decoder.end()
