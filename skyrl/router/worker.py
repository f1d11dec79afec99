"""One inference server as the router knows it, and the router's own small requests to it: probes and broadcasts.
Requests of clients do not pass here."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from urllib.parse import urlsplit

from skyrl.http.answers import Answer
from skyrl.http.client import ask_once
from skyrl.http.connection import Connection, Interrupted, NotAccepted
from skyrl.http.forward import check_headers


class WorkerState(StrEnum):
    HEALTHY = "healthy"
    QUARANTINED = "quarantined"
    """Does not answer. Probed until it answers again."""
    DRAINING = "draining"
    """Being removed: gets no new requests, and is forgotten when its last request has ended."""


def normalise_url(url: str, field: str = "url") -> str:
    """The URL in the form under which the router knows a worker: lower-case scheme and host, a port only if it is not
    the scheme's, no trailing slash. Raises ValueError, with a message for clients that names the field, if it is no
    http(s) URL."""
    url = url.strip()
    if not all("!" <= character <= "~" for character in url):
        raise ValueError(f"{field}: {url!r} has a space or a character that is not ASCII")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ValueError(f"{field}: {url!r} has no valid host and port: {error}") from error
    if parts.scheme not in ("http", "https") or not host:
        raise ValueError(f"{field}: {url!r} is not an http(s) URL")
    if port == 0:
        raise ValueError(f"{field}: {url!r} has no valid port")
    if parts.query or parts.fragment or parts.username is not None:
        raise ValueError(f"{field}: {url!r} must be an address without query, fragment and user name")
    host = f"[{host}]" if ":" in host else host
    default = {"http": 80, "https": 443}[parts.scheme]
    return f"{parts.scheme}://{host}{'' if port in (None, default) else f':{port}'}{parts.path.rstrip('/')}"


@dataclass(slots=True, eq=False)
class Worker:
    """`url` is normalised. `completions_url` is a second address, for requests to `/v1/...` and
    `/inference/v1/...` alone; None: the same."""

    url: str
    completions_url: str | None = None
    worker_type: str = "regular"
    id: str = ""
    state: WorkerState = WorkerState.HEALTHY
    in_flight: int = 0
    failed_probes: int = 0
    """Failed health probes in a row."""
    answers: bool = True
    """The last health probe had a good answer. A worker counts as answering until it was probed."""
    served: int = 0
    """Requests sent since the router started."""
    labels: dict[str, object] = field(default_factory=dict)
    """Other fields of the registration, given back by `GET /workers`."""
    disabled: str | None = None
    """Why an operator, or a group that was not formed, has put this worker out of routing; None: it is enabled."""
    is_dead: bool = False
    """Set by hand: the worker gets no requests, and no requests for all workers either."""
    ended: bool = False
    """Whether it is known that the worker does not run any more."""
    missed: str | None = None
    """What all other workers got while this one was dead. It is out of routing until it has got it too."""
    holds: int = 0
    """Running changes of this worker's weights. It is out of routing meanwhile."""
    exchanges: set[Connection] = field(default_factory=set)
    """The connections of requests that run there."""

    def __post_init__(self) -> None:
        if not self.id:
            self.id = str(uuid.uuid5(uuid.NAMESPACE_URL, self.url))

    @property
    def routable(self) -> bool:
        return self.state is WorkerState.HEALTHY and self.in_service

    @property
    def in_service(self) -> bool:
        """Nobody has taken it out of routing. Whether it answers is another question."""
        return self.disabled is None and not self.is_dead and self.missed is None and not self.holds

    @property
    def held(self) -> bool:
        """After a quarantine, registration alone makes this worker routable again: its owner first restores its
        adapters."""
        return self.labels.get("revive") == "registration"


CONNECT_S = 1.0
MAX_ANSWER_BYTES = 64 * 2**20
"""The checksums of a large model have a few megabytes."""


class Unreachable(Exception):
    """No complete answer came in time. The text says why."""


class Refused(Unreachable):
    """The worker refused the connection."""


Fetch = Callable[[str, str, Iterable[tuple[bytes, bytes]], bytes, float], Awaitable[Answer]]
"""method, url, headers, body, timeout in seconds -> the answer. Raises Unreachable."""


async def fetch(
    method: str,
    url: str,
    headers: Iterable[tuple[bytes, bytes]],
    body: bytes,
    timeout_s: float,
    max_bytes: int = MAX_ANSWER_BYTES,
) -> Answer:
    """One request on a connection of its own, so a probe also shows that the worker accepts connections. Raises
    Unreachable, also for an answer over `max_bytes`, and BadHead."""
    headers = tuple(headers)
    check_headers(headers)
    try:
        async with asyncio.timeout(timeout_s):
            answer = await ask_once(method, url, headers, body, connect_s=CONNECT_S, max_bytes=max_bytes)
    except TimeoutError as error:
        raise Unreachable(f"no answer within {timeout_s:g} s") from error
    except NotAccepted as error:
        raise (Refused if error.refused else Unreachable)(str(error)) from error
    except Interrupted as error:
        raise Unreachable(str(error)) from error
    if not answer.whole:
        raise Unreachable(f"the answer exceeds {max_bytes} bytes")
    return answer
