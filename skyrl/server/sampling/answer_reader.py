"""Reads a 2xx answer of the inference server: checks that it is whole, and decodes large answers on a thread.

Knows answers and jobs. Does not know endpoints, or how often a sample was sent.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Protocol

from skyrl.base.wire.decoding import with_short_switches
from skyrl.server.sampling import completion
from skyrl.server.sampling.answer_bound import MAX_ANSWER_BYTES
from skyrl.server.sampling.error_messages import describe, server_failure
from skyrl.server.sampling.job import SampleJob
from skyrl.server.sampling.transport import Answer

logger = logging.getLogger(__name__)


class Decode(Protocol):
    """`decode_answer` of `completion` or of `generation`."""

    def __call__(self, body: bytes, job: SampleJob, *, zero_fill: bool) -> completion.SampleAnswer: ...


class AnswerReader:
    """Counts answers that cannot be used in `counts`. With `zero_fill`, missing logprobs become 0.0."""

    def __init__(self, counts: Counter[str], *, zero_fill: bool) -> None:
        self._counts = counts
        self._zero_fill = zero_fill
        self._decoder = ThreadPoolExecutor(1, "answers")
        """One thread: a decoder holds the interpreter lock most of the time, so a second one would only take memory."""

    async def read(
        self, answer: Answer, job: SampleJob, decode: Decode = completion.decode_answer
    ) -> completion.SampleAnswer:
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
                return await self._decode(decode, answer.body, job, zero_fill=False)
            except completion.MissingLogprobs as error:
                self._counts["missing_logprobs"] += 1
                if not self._zero_fill:
                    raise
                logger.warning("request %s: %s; zero-filled, as configured", job.request_id, error)
                return await self._decode(decode, answer.body, job, zero_fill=True)
        except completion.MalformedAnswer as error:
            self._counts["malformed"] += 1
            raise server_failure(f"{error}; {describe(answer)}") from error

    async def _decode(self, decode: Decode, body: bytes, job: SampleJob, *, zero_fill: bool) -> completion.SampleAnswer:
        if len(body) <= completion.LARGE_BYTES:
            return decode(body, job, zero_fill=zero_fill)
        work = partial(decode, body, job, zero_fill=zero_fill)
        return await asyncio.get_running_loop().run_in_executor(self._decoder, with_short_switches, work)

    def close(self) -> None:
        self._decoder.shutdown(wait=False, cancel_futures=True)
