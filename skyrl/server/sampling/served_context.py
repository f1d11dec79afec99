"""Gives jobs without `max_tokens` a number that fits the inference server's context. Each server is asked once.

vLLM reads null as 16 tokens, so the request must have a number. A job has none while the engine has not yet published
its limits, and if skyrl does not manage the inference server.
"""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from skyrl.base.wire.errors import ErrorCategory, FailedRequest
from skyrl.server.sampling.endpoint import Endpoint
from skyrl.server.sampling.job import MAX_SAMPLED, SampleJob
from skyrl.server.sampling.transport import Answer, CompletionTransport
from skyrl.server.sampling.verdict import Verdict, verdict_of

MODELS_BYTES = 16 * 2**20
"""The largest list of models that is read: some 25,000 loaded adapters."""
_RETRY = (Verdict.WAIT, Verdict.WAIT_LONGER, Verdict.ASK_HEALTH, Verdict.INTERRUPTED)


class ContextNotKnownYet(Exception):
    """The server, or a proxy before the server, did not send the list of models now. The client handles `answer`
    like an answer to a sample."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(f"/v1/models answered status {answer.status}")
        self.answer = answer


class _Model(msgspec.Struct):
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


class ServedContext:
    """Remembers the context length of each endpoint."""

    def __init__(self, transport: CompletionTransport, headers: dict[str, str]) -> None:
        self._transport = transport
        self._headers = headers
        self._lengths: dict[Endpoint, int] = {}

    async def with_max_tokens(self, job: SampleJob, endpoint: Endpoint, timeout_s: float) -> SampleJob:
        """The job with the largest `max_tokens` that fits after its prompt and under the bound MAX_SAMPLED.

        Raises NotAccepted, Interrupted, ContextNotKnownYet, FailedRequest.
        """
        if endpoint not in self._lengths:
            self._lengths[endpoint] = await self._ask_length(endpoint, timeout_s)
        fitting = self._lengths[endpoint] - len(job.prompt)
        fitting = min(fitting, MAX_SAMPLED // (job.num_samples * (1 + job.topk_sample)))
        return replace(job, max_tokens=max(1, fitting))

    async def _ask_length(self, endpoint: Endpoint, timeout_s: float) -> int:
        """In tokens, prompt included."""
        answer = await self._transport.get(f"{endpoint.url}/v1/models", self._headers, timeout_s, MODELS_BYTES)
        if verdict_of(answer, has_adapter=False) in _RETRY:
            raise ContextNotKnownYet(answer)
        try:
            models = msgspec.json.decode(answer.body, type=_Models).data
        except (msgspec.DecodeError, UnicodeDecodeError):
            models = []
        finally:
            answer.release()
        known = [model.max_model_len for model in models if model.max_model_len is not None]
        if not known:
            raise FailedRequest(
                "sampling_params.max_tokens: the inference server does not say how many tokens fit "
                f"(/v1/models: status {answer.status}); give a number",
                ErrorCategory.USER,
            )
        return max(known)
