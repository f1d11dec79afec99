"""The interface of an exchange: one request to the inference server and its answer, without the failure rules.

The forwarding client sends the request of an exchange, perhaps several times, until `read` returns a result.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, TypeVar

from skyrl.base.types.weights import WeightsRef
from skyrl.server.sampling.endpoint import Endpoint
from skyrl.server.sampling.transport import Answer

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
