"""The exchange of a sample job: a completion request, and the decoded SampleResponse.

`picture_exchange` has the exchange of a job with pictures.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from skyrl.base.types.weights import WeightsRef
from skyrl.base.wire.errors import ErrorCategory, FailedRequest
from skyrl.inference.vllm_plugin.tokens_header import TOKENS_ONLY
from skyrl.server.sampling import completion
from skyrl.server.sampling.answer_bound import answer_bound
from skyrl.server.sampling.answer_reader import AnswerReader
from skyrl.server.sampling.endpoint import Endpoint
from skyrl.server.sampling.error_messages import describe, message_of, server_failure
from skyrl.server.sampling.job import SampleJob
from skyrl.server.sampling.served_context import ServedContext
from skyrl.server.sampling.transport import Answer, CompletionTransport


class SampleExchange:
    """If `job.max_tokens` is None, each try asks the server how many tokens fit."""

    operation = "text_completion"

    def __init__(
        self,
        job: SampleJob,
        priority: int | None,
        transport: CompletionTransport,
        context: ServedContext,
        reader: AnswerReader,
    ) -> None:
        self._job = job
        self.request_id = job.request_id
        self.weights: WeightsRef = job.weights
        self.headers: Mapping[str, str] = {"X-Request-Id": job.request_id, TOKENS_ONLY: "1"}
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
