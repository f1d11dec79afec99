"""The longest sequence that an inference server takes. The server is asked once.

Jobs without `max_tokens` need it: vLLM would take null for 16 tokens, so it must be told a number. Such jobs come while
the engine has not yet said what fits, and in front of a server that skyrl does not manage.
"""

from __future__ import annotations

import msgspec

from skyrl.sampling.endpoint import Endpoint
from skyrl.sampling.transport import Answer, CompletionTransport
from skyrl.sampling.verdict import Verdict, verdict_of
from skyrl.wire.errors import ErrorCategory, FailedRequest

MODELS_BYTES = 16 * 2**20
"""The longest list of models that is read: some 25,000 loaded adapters."""
_LATER = (Verdict.WAIT, Verdict.WAIT_LONGER, Verdict.ASK_HEALTH)


class ContextNotKnownYet(Exception):
    """The server, or a proxy before it, gave `answer` instead of the list of models, as it might to a sample."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(f"/v1/models answered status {answer.status}")
        self.answer = answer


class _Model(msgspec.Struct):
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


class ServedContext:
    """Remembers the length of every endpoint that has told it."""

    def __init__(self, transport: CompletionTransport, headers: dict[str, str]) -> None:
        self._transport = transport
        self._headers = headers
        self._lengths: dict[Endpoint, int] = {}

    async def length(self, endpoint: Endpoint, timeout_s: float) -> int:
        """In tokens, prompt included. Raises NotAccepted, Interrupted, ContextNotKnownYet, FailedRequest."""
        if endpoint not in self._lengths:
            self._lengths[endpoint] = await self._ask(endpoint, timeout_s)
        return self._lengths[endpoint]

    async def _ask(self, endpoint: Endpoint, timeout_s: float) -> int:
        answer = await self._transport.get(f"{endpoint.url}/v1/models", self._headers, timeout_s, MODELS_BYTES)
        if verdict_of(answer, has_adapter=False) in _LATER:
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
