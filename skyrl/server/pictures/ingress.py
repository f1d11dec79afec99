"""Takes the pictures out of a request before it is recorded: checks each file, stores it once, and notes its use.

A sample with a wrong picture is refused at once. A training command is recorded all the same, and fails when its turn
comes (see `skyrl.server.api.training`); then the database has the reason in place of the file.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial

from skyrl.base.pictures.picture import BadPicture, Pictures, format_of
from skyrl.base.pictures.vision import KnownPicture, NoVision, VisionConfig
from skyrl.base.wire.decoding import with_short_switches
from skyrl.base.wire.errors import RequestError
from skyrl.base.wire.sample_request import (
    SampleRequest,
    TakenOut,
    decode_sample_request,
    may_have_images,
    take_out,
    text_and_images,
)
from skyrl.sampling.metrics import ImageMetrics
from skyrl.server.pictures.checking import PictureChecks
from skyrl.server.pictures.placed import place_images, place_stored, seeing
from skyrl.storage.db import pictures as rows
from skyrl.storage.db.database import Database
from skyrl.storage.db.pictures import PictureFiles

LARGE_BODY_BYTES = 256 * 2**10
"""Larger bodies are read on a thread, one at a time: several such threads would take turns with the event loop, which
then waits for each of them (`make bench BENCH="--only beside-pictures"`)."""


class PictureIngress:
    """Of one API process. `sight`: how the base model sees. `most_bytes` bounds the files in the database."""

    def __init__(
        self,
        database: Database,
        checks: PictureChecks,
        files: PictureFiles,
        sight: VisionConfig | NoVision,
        most_bytes: int,
        metrics: ImageMetrics,
    ) -> None:
        self._database = database
        self._checks = checks
        self._files = files
        self._sight = sight
        self._most_bytes = most_bytes
        self._metrics = metrics
        self._reading = asyncio.Lock()
        self._writes = asyncio.Lock()
        self._checking: dict[str, asyncio.Task[rows.CheckedFile]] = {}

    async def sample(
        self, body: bytes, request: SampleRequest, vocab_size: int | None, tenant: str, request_id: str
    ) -> tuple[bytes, SampleRequest, Pictures]:
        """The body of a sample request without its files; and the request with a prompt of tokens, in which its
        pictures have their places. Raises RequestError that names the chunk."""
        sight = seeing(self._sight, text_and_images(request.prompt)[1][0].name)
        taken = await self._taken_out(body, "json")
        known, new = await self._look(taken, tenant)
        request = decode_sample_request(taken.body, vocab_size)
        pictures = place_images(request, known, sight, tenant)
        await self._keep(tenant, request_id, taken, known, new)
        return taken.body, request, pictures

    async def stored_sample(self, request: SampleRequest, tenant: str) -> Pictures:
        """The pictures of a stored request, whose files were taken out before. Raises RequestError."""
        return await place_stored(request, self._database, self._sight, tenant)

    async def training(self, body: bytes, body_format: str, tenant: str, request_id: str) -> tuple[bytes, int]:
        """The body of a training command without its files, and how many tokens its pictures take."""
        if isinstance(self._sight, NoVision) or not may_have_images(body, body_format):
            return body, 0
        try:
            taken = await self._taken_out(body, body_format)
        except RequestError:  # the command fails for the same reason when its turn comes
            return body, 0
        known, new = await self._look(taken, tenant)
        await self._keep(tenant, request_id, taken, known, new)
        counts = (len(taken.names[digest]) * _tokens(found, self._sight) for digest, found in known.items())
        return taken.body, sum(counts)

    async def _taken_out(self, body: bytes, body_format: str) -> TakenOut:
        if len(body) <= LARGE_BODY_BYTES:
            return take_out(body, body_format)
        async with self._reading:
            return await asyncio.to_thread(with_short_switches, partial(take_out, body, body_format))

    async def _look(self, taken: TakenOut, tenant: str) -> tuple[dict[str, KnownPicture], dict[str, rows.CheckedFile]]:
        """What is known of the pictures of a request, and those among them that are not stored. Files that are not
        stored are checked, each once, however many requests have it."""
        known = await self._database.read_async(lambda c: rows.find(c, tenant, list(taken.names)))
        new: dict[str, rows.CheckedFile] = {}
        for digest in taken.files:
            if digest not in known:
                new[digest] = await self._checked(digest, taken.files[digest])
        faulty = sum(file.known.error is not None for file in new.values())
        self._metrics.taken(len(new) - faulty, len(known), faulty)
        return known | {digest: file.known for digest, file in new.items()}, new

    async def _checked(self, digest: str, data: bytes) -> rows.CheckedFile:
        running = self._checking.get(digest)
        if running is None:
            running = self._checking[digest] = asyncio.create_task(self._check(data))
            running.add_done_callback(lambda _: self._checking.pop(digest, None))
        return await asyncio.shield(running)

    async def _check(self, data: bytes) -> rows.CheckedFile:
        try:
            form = format_of(data)
            width, height = await self._checks.size(data, form)
        except BadPicture as error:
            return rows.CheckedFile(KnownPicture("png", error=str(error)), b"")
        return rows.CheckedFile(KnownPicture(form, width, height), data)

    async def _keep(
        self,
        tenant: str,
        request_id: str,
        taken: TakenOut,
        known: Mapping[str, KnownPicture],
        new: Mapping[str, rows.CheckedFile],
    ) -> None:
        """Store the new files, and note that the request uses its pictures. Returns when this is durable."""
        for digest, data in taken.files.items():
            if known[digest].error is None:
                self._files.put(tenant, digest, data)
        most, digests = self._most_bytes, list(known)
        async with self._writes:  # one at a time, so that the group commit gets the write lock in between
            write = self._database.write
            lost = await asyncio.to_thread(write, lambda c: rows.keep(c, tenant, request_id, digests, new, most))
            # Deleted since they were looked up, because nobody had used them for long: the request may have the files.
            files = ((digest, taken.files[digest]) for digest in lost if digest in taken.files)
            again = {digest: rows.CheckedFile(known[digest], data) for digest, data in files}
            if again:
                await asyncio.to_thread(write, lambda c: rows.keep(c, tenant, request_id, again, again, most))


def _tokens(known: KnownPicture, sight: VisionConfig) -> int:
    """0 for a picture that is not taken: its command fails."""
    try:
        return 0 if known.error is not None else sight.tokens(known.width, known.height)
    except BadPicture:
        return 0
