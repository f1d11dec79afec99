"""The exchange of a sample job with pictures: a request with token ids and files, and the decoded SampleResponse.

Each try reads the files again, so that a sample which waits for the inference server keeps no file in memory. Knows
neither the failure rules nor where files are stored.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping

from skyrl.base.wire.errors import ErrorCategory, FailedRequest
from skyrl.server.sampling import completion, generation
from skyrl.server.sampling.answer_bound import answer_bound
from skyrl.server.sampling.answer_reader import AnswerReader
from skyrl.server.sampling.endpoint import Endpoint
from skyrl.server.sampling.error_messages import server_failure
from skyrl.server.sampling.job import SampleJob
from skyrl.server.sampling.picture_files import PictureFiles
from skyrl.server.sampling.sample_exchange import SampleExchange
from skyrl.server.sampling.served_context import ServedContext
from skyrl.server.sampling.transport import Answer, CompletionTransport, NotAccepted, Pieces

MAX_SENDS = 8
"""Requests with pictures whose bodies one process sends at a time. Only these keep files in memory."""
MAX_FILES_BYTES = 45 * 2**20
"""The files of one prompt together. As base64 they have 60 MiB, and skyrl's router takes bodies up to 64."""
_SWITCHED_OFF = b"--enable-scale-out"
"""Part of the error by which vLLM refuses the route if the route was not switched on."""
_NO_ROUTE = b'{"detail":"Not Found"}'


class PictureSends:
    """The files of pictures, and whose turn it is to send them."""

    def __init__(self, files: PictureFiles) -> None:
        self.files = files
        self._turns = asyncio.Semaphore(MAX_SENDS)

    async def turn(self, timeout_s: float) -> Turn:
        """Raises NotAccepted if there is none in time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._turns.acquire()
        except TimeoutError as error:
            raise NotAccepted("other requests with pictures were still being sent") from error
        return Turn(self._turns)


class Turn:
    """One of the turns, until `end`. A second call of `end` does nothing."""

    def __init__(self, turns: asyncio.Semaphore) -> None:
        self._turns: asyncio.Semaphore | None = turns

    def end(self) -> None:
        turns, self._turns = self._turns, None
        if turns is not None:
            turns.release()

    def ending(self, pieces: Iterator[bytes]) -> Iterator[bytes]:
        """The pieces; the turn ends with the last one."""
        yield from pieces
        self.end()


class PictureExchange(SampleExchange):
    """Of a job with pictures."""

    operation = "generate_content"

    def __init__(
        self,
        job: SampleJob,
        priority: int | None,
        transport: CompletionTransport,
        context: ServedContext,
        reader: AnswerReader,
        sends: PictureSends,
    ) -> None:
        super().__init__(job, priority, transport, context, reader)
        self._sends = sends

    async def send(self, endpoint: Endpoint, headers: Mapping[str, str], timeout_s: float) -> Answer:
        job, url = self._job, endpoint.url + generation.PATH
        end = time.perf_counter() + timeout_s
        if job.max_tokens is None:
            job = await self._context.with_max_tokens(job, endpoint, timeout_s)
        turn = await self._sends.turn(end - time.perf_counter())
        try:
            body, rest = await self._encode(job)
            rest.pieces = turn.ending(rest.pieces)
            sent = time.perf_counter()
            answer = await self._transport.post(url, body, headers, end - sent, answer_bound(job), rest)
        finally:
            turn.end()
        self._upstream_s += time.perf_counter() - sent
        self._check_route(answer)
        return answer

    async def _encode(self, job: SampleJob) -> tuple[bytes, Pieces]:
        assert job.pictures is not None
        files = await self._sends.files.read(job.pictures)
        size = sum(len(files[picture.digest]) for picture in job.pictures.placed)
        if size > MAX_FILES_BYTES:
            raise FailedRequest(
                f"the images of the prompt have {size} bytes together, and one prompt may have {MAX_FILES_BYTES}",
                ErrorCategory.USER,
            )
        return generation.encode_request(job, self._priority, files)

    def _check_route(self, answer: Answer) -> None:
        """Raise FailedRequest if the server takes no pictures at all."""
        if answer.status == 403 and _SWITCHED_OFF in answer.body:
            raise server_failure("the inference server takes no images: start vLLM with --enable-scale-out")
        if answer.status == 404 and answer.body == _NO_ROUTE:
            raise server_failure(f"the inference server takes no images: it has no {generation.PATH}")

    async def read(self, answer: Answer) -> completion.SampleAnswer:
        result = await self._reader.read(answer, self._job, generation.decode_answer)
        result.upstream_s, result.server = self._upstream_s, answer.worker
        return result
