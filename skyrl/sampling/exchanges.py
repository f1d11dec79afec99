"""Exchanges: one request to the inference server and its answer, without the failure rules.

`Exchange` is the interface. The forwarding client sends the request of an exchange, perhaps several times, until `read`
returns a result. Here are the exchanges of sample jobs; `skyrl.chat.openai.exchanges` has those of chats.

`answer_bound` is the largest answer that vLLM can give to a job. The bound protects against servers that send anything.
Each part counts with the largest size that vLLM could write, not the usual one: the text of a token has up to some 128
characters, JSON may write each as two bytes, and the text occurs several times. Usually a cell of the prompt has 80
bytes and a sampled token 75.

Each try of a job with pictures reads the files again, so that a sample which waits for the inference server keeps no
file in memory. Knows neither the failure rules nor where files are stored.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Protocol, TypeVar

from skyrl.base.types.weights import WeightsRef
from skyrl.base.wire.decoding import with_short_switches
from skyrl.base.wire.errors import ErrorCategory, FailedRequest
from skyrl.http.answers import Answer
from skyrl.http.client import HttpClient, Pieces
from skyrl.http.connection import NotAccepted
from skyrl.inference.vllm_plugin.protocol import PROMPT_CELLS, TOKENS_ONLY
from skyrl.sampling import completion, pictures
from skyrl.sampling.job import SampleJob
from skyrl.sampling.prompt_answer import prompt_scores
from skyrl.sampling.servers import Endpoint, ServedContext, describe, message_of, server_failure
from skyrl.storage.db.pictures import PictureFiles

T_co = TypeVar("T_co", covariant=True)


class Exchange(Protocol[T_co]):
    @property
    def request_id(self) -> str:
        """The request's id in this process."""
        ...

    @property
    def weights(self) -> WeightsRef:
        """If they are an adapter, the client loads the adapter into a server that does not know it."""
        ...

    @property
    def operation(self) -> str:
        """What it asks for, in OpenTelemetry's words (`gen_ai.operation.name`)."""
        ...

    @property
    def headers(self) -> Mapping[str, str]:
        """Headers of this request alone."""
        ...

    @property
    def key(self) -> str:
        """A routing key that no other request has."""
        ...

    @property
    def shared_key(self) -> str:
        """A routing key for requests that begin alike. skyrl's router sends them to one replica while it can."""
        ...

    async def send(self, endpoint: Endpoint, headers: Mapping[str, str], timeout_s: float) -> Answer:
        """Send the request once. Raises NotAccepted, Interrupted, and ContextNotKnownYet."""
        ...

    async def read(self, answer: Answer) -> T_co:
        """The result of a 2xx answer. Raises AbortedAnswer if the server aborted the request, and FailedRequest."""
        ...

    def refusal(self, answer: Answer) -> Exception:
        """The error to raise for a request that the server refused."""
        ...

    def failure(self, answer: Answer) -> Exception:
        """The error to raise for a request at which a server of good health has failed too often."""
        ...


MAX_ANSWER_BYTES = 512 * 2**20
"""For any job: some five million sampled tokens with their logprobs."""
BASE_BYTES = 2**20
SEQUENCE_BYTES = 4 * 2**10
ECHOED_TOKEN_BYTES = 12
"""Each sequence repeats the prompt's token ids."""
SAMPLED_TOKEN_BYTES = 1024
"""The id, text, logprob and offset of a sampled token, and its cell in its row of best tokens."""
SAMPLED_CELL_BYTES = 96
"""Each further cell of that row: usually 45 bytes, because a cell has the id of its token instead of the text."""
PROMPT_CELL_BYTES = 512
"""A cell of a row of the prompt: one token with its text."""


def answer_bound(job: SampleJob) -> int:
    """In bytes. `job.max_tokens` must not be None."""
    assert job.max_tokens is not None
    sequences, prompt = 1 if job.greedy else job.num_samples, len(job.prompt)
    sampled = sequences * job.max_tokens * (SAMPLED_TOKEN_BYTES + job.topk_sample * SAMPLED_CELL_BYTES)
    cells = 0
    if job.wants_prompt:
        scores = prompt_scores(job)
        cells = prompt * (1 + job.topk_prompt) + (0 if scores is None else scores.appended(prompt))
    echoed = sequences * (SEQUENCE_BYTES + prompt * ECHOED_TOKEN_BYTES)
    return min(MAX_ANSWER_BYTES, BASE_BYTES + echoed + sampled + cells * PROMPT_CELL_BYTES)


logger = logging.getLogger(__name__)


class AnswerReader:
    """Counts answers that cannot be used in `counts`. With `zero_fill`, missing logprobs become 0.0."""

    def __init__(self, counts: Counter[str], *, zero_fill: bool) -> None:
        self._counts = counts
        self._zero_fill = zero_fill
        self._decoder = ThreadPoolExecutor(1, "answers")
        """One thread: a decoder holds the interpreter lock most of the time, so a second one would only take memory."""

    async def read(self, answer: Answer, job: SampleJob) -> completion.SampleAnswer:
        """Raises AbortedAnswer if vLLM aborted the sample, and FailedRequest if the answer cannot be used."""
        if not answer.whole:
            self._counts["malformed"] += 1
            raise server_failure(
                "the inference server's answer is larger than any right answer to this request, or larger than "
                f"{MAX_ANSWER_BYTES // 2**20} MiB; in the second case ask for fewer samples in one request; "
                f"{describe(answer)}"
            )
        try:
            try:
                return await self._decode(answer.body, job, zero_fill=False)
            except completion.MissingLogprobs as error:
                self._counts["missing_logprobs"] += 1
                if not self._zero_fill:
                    raise
                logger.warning("request %s: %s; zero-filled, as configured", job.request_id, error)
                return await self._decode(answer.body, job, zero_fill=True)
        except completion.MalformedAnswer as error:
            self._counts["malformed"] += 1
            raise server_failure(f"{error}; {describe(answer)}") from error

    async def _decode(self, body: bytes, job: SampleJob, *, zero_fill: bool) -> completion.SampleAnswer:
        if len(body) <= completion.LARGE_BYTES:
            return completion.decode_answer(body, job, zero_fill=zero_fill)
        work = partial(completion.decode_answer, body, job, zero_fill=zero_fill)
        return await asyncio.get_running_loop().run_in_executor(self._decoder, with_short_switches, work)

    def close(self) -> None:
        self._decoder.shutdown(wait=False, cancel_futures=True)


class SampleExchange:
    """If `job.max_tokens` is None, each try asks the server how many tokens fit."""

    operation = "text_completion"

    def __init__(
        self,
        job: SampleJob,
        priority: int | None,
        transport: HttpClient,
        context: ServedContext,
        reader: AnswerReader,
    ) -> None:
        self._job = job
        self.request_id = job.request_id
        self.weights: WeightsRef = job.weights
        self.headers: Mapping[str, str] = {"X-Request-Id": job.request_id, TOKENS_ONLY: PROMPT_CELLS}
        """vLLM's own id of the request becomes `cmpl-<request id>`."""
        self.key = job.session_key
        self.shared_key = job.sampling_session
        self._priority = priority
        self._transport = transport
        self._context = context
        self._reader = reader
        self._upstream_s = 0.0
        """How long servers have had the job until they answered."""
        known = job.max_tokens is not None and job.pictures is None
        self._body = completion.encode_request(job, priority) if known else None

    async def send(self, endpoint: Endpoint, headers: Mapping[str, str], timeout_s: float) -> Answer:
        job, body = self._job, self._body
        if body is None:
            job = await self._context.with_max_tokens(job, endpoint, timeout_s)
            body = completion.encode_request(job, self._priority)
        url = endpoint.url + completion.PATH
        sent = time.perf_counter()
        answer = await self._transport.post(url, body, headers, timeout_s, answer_bound(job))
        self._upstream_s += time.perf_counter() - sent
        return answer

    async def read(self, answer: Answer) -> completion.SampleAnswer:
        result = await self._reader.read(answer, self._job)
        result.upstream_s, result.server = self._upstream_s, answer.worker
        return result

    def refusal(self, answer: Answer) -> Exception:
        return FailedRequest(message_of(answer), ErrorCategory.USER)

    def failure(self, answer: Answer) -> Exception:
        return server_failure(describe(answer))


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

    async def turn(self, timeout_s: float) -> ExitStack:
        """A turn, until it is closed. Raises NotAccepted if there is none in time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._turns.acquire()
        except TimeoutError as error:
            raise NotAccepted("other requests with pictures were still being sent") from error
        turn = ExitStack()
        turn.callback(self._turns.release)
        return turn


def _closing(turn: ExitStack, pieces: Iterator[bytes]) -> Iterator[bytes]:
    """The pieces; the turn ends with the last one."""
    with turn:
        yield from pieces


class PictureExchange(SampleExchange):
    """Of a job with pictures."""

    operation = "generate_content"

    def __init__(
        self,
        job: SampleJob,
        priority: int | None,
        transport: HttpClient,
        context: ServedContext,
        reader: AnswerReader,
        sends: PictureSends,
    ) -> None:
        super().__init__(job, priority, transport, context, reader)
        self._sends = sends

    async def send(self, endpoint: Endpoint, headers: Mapping[str, str], timeout_s: float) -> Answer:
        job, url = self._job, endpoint.url + pictures.PATH
        end = time.perf_counter() + timeout_s
        if job.max_tokens is None:
            job = await self._context.with_max_tokens(job, endpoint, timeout_s)
        turn = await self._sends.turn(end - time.perf_counter())
        try:
            body, rest = await self._encode(job)
            rest.pieces = _closing(turn, rest.pieces)
            sent = time.perf_counter()
            answer = await self._transport.post(url, body, headers, end - sent, answer_bound(job), rest)
        finally:
            turn.close()
        self._upstream_s += time.perf_counter() - sent
        self._check_route(answer)
        return answer

    async def _encode(self, job: SampleJob) -> tuple[bytes, Pieces]:
        assert job.pictures is not None
        files = await self._sends.files.of(job.pictures)
        size = sum(len(files[picture.digest]) for picture in job.pictures.placed)
        if size > MAX_FILES_BYTES:
            raise FailedRequest(
                f"the images of the prompt have {size} bytes together, and one prompt may have {MAX_FILES_BYTES}",
                ErrorCategory.USER,
            )
        return pictures.encode_request(job, self._priority, files)

    def _check_route(self, answer: Answer) -> None:
        """Raise FailedRequest if the server takes no pictures at all."""
        if answer.status == 403 and _SWITCHED_OFF in answer.body:
            raise server_failure("the inference server takes no images: start vLLM with --enable-scale-out")
        if answer.status == 404 and answer.body == _NO_ROUTE:
            raise server_failure(f"the inference server takes no images: it has no {pictures.PATH}")
