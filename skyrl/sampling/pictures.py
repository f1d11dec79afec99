"""Pictures of requests: how they come in, where they stand in a prompt, and the requests of samples that have some.

`PictureIngress` takes the files out of a request before the request is recorded: it checks each file in a worker
process, stores the file once, and notes its use. A sample with a wrong picture is refused at once. A training command
is recorded all the same, and fails when its turn comes (see `skyrl.api.routes.training`); then the database has the
reason in place of the file.

`encode_request` makes the body for vLLM's `/inference/v1/generate`, which takes token ids and pictures: in the request
each picture has one `image_token_id`, and vLLM's processor makes as many of it as the picture has tokens. `completion`
decodes the answer.
"""

from __future__ import annotations

import asyncio
import binascii
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import msgspec
import numpy as np

from skyrl.base.pictures.picture import BadPicture, PictureFormat, Pictures, format_of
from skyrl.base.pictures.places import KnownPicture, place
from skyrl.base.pictures.vision import NoVision, VisionConfig
from skyrl.base.wire.decoding import with_short_switches
from skyrl.base.wire.errors import RequestError
from skyrl.base.wire.sample_request import (
    LOCATION,
    Chunk,
    SampleRequest,
    TakenOut,
    decode_sample_request,
    may_have_images,
    take_out,
    text_and_images,
)
from skyrl.http.client import Pieces
from skyrl.runtime.pictures.checker import NotChecked, PictureChecker, TooManyPictures
from skyrl.sampling.completion import sampling_params
from skyrl.sampling.job import SampleJob
from skyrl.sampling.metrics import ImageMetrics
from skyrl.sampling.prompt_answer import prompt_scores
from skyrl.storage.db import pictures as rows
from skyrl.storage.db.database import Database
from skyrl.storage.db.pictures import PictureFiles

NOT_CHECKED_S = 5.0


class PictureChecks:
    """Of one API process, with one worker."""

    def __init__(self, metrics: ImageMetrics) -> None:
        self._checker = PictureChecker()
        self._metrics = metrics

    async def size(self, data: bytes, form: PictureFormat) -> tuple[int, int]:
        """Width and height in pixels. Raises BadPicture; and RequestError if too many pictures wait for their check
        (429), or if there is no worker (503)."""
        try:
            with self._metrics.check():
                return await self._checker.check(data, form)
        except TooManyPictures as error:
            raise RequestError(str(error), status=429, retry_after_s=error.retry_after_s) from error
        except NotChecked as error:
            raise RequestError(str(error), status=503, retry_after_s=NOT_CHECKED_S) from error

    async def close(self) -> None:
        """End the worker. May be called twice."""
        await self._checker.close()


def seeing(sight: VisionConfig | NoVision, name: str) -> VisionConfig:
    """Raises RequestError naming the image if the base model takes text only."""
    if isinstance(sight, NoVision):
        raise RequestError(f"is an image, and the base model takes text only: {sight}", field=name)
    return sight


def place_images(
    request: SampleRequest, known: Mapping[str, KnownPicture], sight: VisionConfig, tenant: str
) -> Pictures:
    """Replace the chunks of the request's prompt by one of tokens, in which the pictures have their places. Raises
    RequestError that names the chunk."""
    text, images = text_and_images(request.prompt)
    try:
        array = np.asarray(text, np.int64)
    except OverflowError as error:
        raise RequestError("token ids must fit 64 bits", field="prompt") from error
    tokens, placed = place(array, images, known, sight)
    request.prompt.chunks[:] = [Chunk(tokens=tokens.tolist())]
    return Pictures(tenant, sight.image_token_id, placed)


async def place_stored(
    request: SampleRequest, database: Database, sight: VisionConfig | NoVision, tenant: str
) -> Pictures:
    """`place_images` of a stored request, whose files were taken out before."""
    images = text_and_images(request.prompt)[1]
    sight = seeing(sight, images[0].name)
    digests = [image.location.removeprefix(LOCATION) for image in images]
    known = await database.read_async(lambda c: rows.find(c, tenant, digests))
    return place_images(request, known, sight, tenant)


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


PATH = "/inference/v1/generate"
PIECE_BYTES = 192 * 2**10
"""How much of a file becomes base64 at a time: some 0.1 ms. Divisible by 3, so that the pieces' texts can be joined."""


_encoder = msgspec.json.Encoder()


def encode_request(job: SampleJob, priority: int | None, files: Mapping[str, bytes]) -> tuple[bytes, Pieces]:
    """The beginning of the body to post, and the rest, which is made while it is sent. `files`: by digest. `job` must
    have pictures."""
    assert job.pictures is not None
    params = sampling_params(job)
    # vLLM lists the sampled token first and cuts the list to this length, so one more keeps the k best whole.
    params["logprobs"] = job.topk_sample and job.topk_sample + 1
    if not job.stop_strings:
        params["detokenize"] = False  # saves the text, also of each logprob, which nobody reads
    if (scores := prompt_scores(job)) is not None:
        params["extra_args"] = scores.to_extra_args()
    fields = {
        "model": job.model,  # first: skyrl's router reads it in the beginning of a long body
        "token_ids": one_for_each(job.prompt[:], job.pictures),
        "sampling_params": params,
        "return_token_ids": True,
        "stream": False,
    }
    if priority is not None:
        fields["priority"] = priority
    start = _encoder.encode(fields)[:-1] + b',"content_parts":['
    heads = [
        b'%s{"type":"image_url","uuid":"%s","url":"data:image/%s;base64,'
        % (b"," if number else b"", picture.digest.encode(), picture.format.encode())
        for number, picture in enumerate(job.pictures.placed)
    ]
    pictures = [files[picture.digest] for picture in job.pictures.placed]
    size = sum(len(head) + (len(data) + 2) // 3 * 4 + 2 for head, data in zip(heads, pictures, strict=True)) + 2
    return start, Pieces(size, _pieces(heads, pictures))


def one_for_each(prompt: Sequence[int], pictures: Pictures) -> list[int]:
    """The prompt with one `image_token_id` for each picture."""
    tokens: list[int] = []
    end = 0
    for picture in pictures.placed:
        tokens += prompt[end : picture.start]
        tokens.append(pictures.image_token_id)
        end = picture.stop
    return [*tokens, *prompt[end:]]


def _pieces(heads: Sequence[bytes], pictures: Sequence[bytes]) -> Iterator[bytes]:
    for head, data in zip(heads, pictures, strict=True):
        yield head
        view = memoryview(data)
        for start in range(0, len(data), PIECE_BYTES):
            yield binascii.b2a_base64(view[start : start + PIECE_BYTES], newline=False)
        yield b'"}'
    yield b"]}"
