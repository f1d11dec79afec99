"""Asks an inference server's /health whether the server is alive, dying or gone."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from skyrl.server.sampling.endpoint import Endpoint
from skyrl.server.sampling.transport import CompletionTransport, Interrupted, NotAccepted

HEALTH_TIMEOUT_S = 5.0


class Health(Enum):
    """DYING: /health answers 503, or breaks off. GONE: the server cannot be reached. ALIVE: any other answer, so also a
    404 of a server without /health."""

    ALIVE = "alive"
    DYING = "dying"
    GONE = "gone"


async def health_of(transport: CompletionTransport, endpoint: Endpoint, headers: Mapping[str, str]) -> Health:
    try:
        answer = await transport.get(f"{endpoint.url}/health", headers, HEALTH_TIMEOUT_S)
    except NotAccepted:
        return Health.GONE
    except Interrupted:
        return Health.DYING
    return Health.DYING if answer.status == 503 else Health.ALIVE
