"""Checks pictures one after the other in a worker process. Knows the queue and when a worker is replaced.

A file that crashes, swells or blocks its decoder ends the worker alone; the process that asks, which serves the samples
of all tenants, only sends bytes and waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from skyrl.base.pictures.picture import BadPicture, PictureFormat
from skyrl.runtime.pictures.decoder import Decoder, WorkerDied
from skyrl.runtime.pictures.protocol import Limits

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
