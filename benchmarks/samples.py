"""One sample, straight to the upstream or through a Tinker server, on a connection that the caller keeps."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import urlsplit

from benchmarks.checks import AnswerCheck
from benchmarks.connection import Connection
from benchmarks.prompts import VARIANTS, prompt

FIRST_BACK_OFF_S, LONGEST_BACK_OFF_S = 0.05, 2.0


@dataclass(frozen=True)
class LoadSpec:
    """`pid`: the process whose CPU is read; `upstream_pid` is another one that the load uses. `exact`: the null
    upstream answers, so its tokens are known."""

    url: str
    path: Literal["direct", "tinker"]
    in_flight: int
    seconds: float
    warm_up_s: float = 1.0
    sequences: int = 1
    prompt_tokens: int = 512
    max_tokens: int = 64
    base_model: str = "tiny"
    api_key: str = "tml-bench"
    pid: int | None = None
    upstream_pid: int | None = None
    exact: bool = True


class _Samples:
    def __init__(self, spec: LoadSpec) -> None:
        address = urlsplit(spec.url)
        self._host, self._port = address.hostname or "127.0.0.1", address.port or 80
        self._headers = (
            f"X-API-Key: {spec.api_key}\r\nContent-Type: application/json\r\nAccept: application/x-protobuf\r\n"
        ).encode()
        self._spec = spec
        self._check = AnswerCheck(spec.sequences, spec.max_tokens, spec.exact)
        self._prompts = [json.dumps(prompt(index, spec.prompt_tokens)).encode() for index in range(VARIANTS)]

    def connect(self) -> Connection:
        return Connection(self._host, self._port, self._headers)


class DirectSamples(_Samples):
    """The upstream's own /v1/completions."""

    async def open(self) -> None:
        tail = {"n": self._spec.sequences, "max_tokens": self._spec.max_tokens, "logprobs": 0, "return_token_ids": True}
        self._body = (
            json.dumps({"model": self._spec.base_model})[:-1].encode()
            + b', "prompt": %s, '
            + json.dumps(tail)[1:].encode()
        )

    async def sample(self, connection: Connection, number: int) -> str | None:
        """None, or what went wrong. Raises OSError."""
        variant = number % VARIANTS
        status, answer = await connection.post(b"/v1/completions", self._body % self._prompts[variant])
        return self._check.problem(variant, answer) if status == 200 else f"completions {status}"

    def counts(self) -> dict[str, int]:
        return {}


class TinkerSamples(_Samples):
    """asample and retrieve_future on one sampling session, opened at the start."""

    def __init__(self, spec: LoadSpec) -> None:
        super().__init__(spec)
        self.session = ""
        self.accepted = self.delivered = self.polls = self.told_to_wait = 0

    async def open(self) -> None:
        """Raises RuntimeError with the server's words where it does not let us."""
        setup = self.connect()
        session = await self._create(setup, "session", {"sdk_version": "0.38.0", "tags": [], "user_metadata": {}})
        self.session = session["session_id"]
        wanted = {"session_id": self.session, "sampling_session_seq_id": 0, "base_model": self._spec.base_model}
        sampler = await self._create(setup, "sampling_session", wanted)
        setup.close()
        params = {"max_tokens": self._spec.max_tokens, "seed": 1, "temperature": 1.0, "top_k": -1, "top_p": 1.0}
        head = {
            "num_samples": self._spec.sequences,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": "PROMPT"}]},
        }
        tail = {"sampling_params": params, "sampling_session_id": sampler["sampling_session_id"], "type": "sample"}
        text = json.dumps({**head, **tail, "seq_id": "NUMBER"}).replace("%", "%%")
        self._body = text.replace('"PROMPT"', "%s").replace('"NUMBER"', "%d").encode()

    async def _create(self, connection: Connection, what: str, body: dict[str, Any]) -> dict[str, Any]:
        path = f"/api/v1/create_{what}"
        status, answer = await connection.post(path.encode(), json.dumps({**body, "type": f"create_{what}"}).encode())
        if status != 200:
            raise RuntimeError(f"{path}: {status} {answer[:300].decode(errors='replace')}")
        return json.loads(answer)

    async def heartbeat(self, connection: Connection) -> int:
        """The status."""
        body = json.dumps({"session_id": self.session, "type": "session_heartbeat"}).encode()
        return (await connection.post(b"/api/v1/session_heartbeat", body))[0]

    async def submit(self, connection: Connection, number: int) -> tuple[bytes | None, str | None]:
        """The body that asks for the result, or what went wrong. Waits as long as it is told to. Raises OSError."""
        body = self._body % (self._prompts[number % VARIANTS], number)
        back_off_s = FIRST_BACK_OFF_S
        while True:
            status, answer = await connection.post(b"/api/v1/asample", body)
            if status != 429:
                break
            self.told_to_wait += 1
            await asyncio.sleep(back_off_s)
            back_off_s = min(2 * back_off_s, LONGEST_BACK_OFF_S)
        if status != 200:
            return None, f"asample {status}"
        self.accepted += 1
        return json.dumps({"request_id": json.loads(answer)["request_id"]}).encode(), None

    async def retrieve(self, connection: Connection, wanted: bytes) -> tuple[int, bytes]:
        """Status and body of the first answer that is not "try again". Raises OSError."""
        while True:
            self.polls += 1
            status, answer = await connection.post(b"/api/v1/retrieve_future", wanted)
            if status != 408 and not (status == 200 and b'"try_again"' in answer[:200]):
                return status, answer

    def problem(self, number: int, status: int, answer: bytes) -> str | None:
        """What is wrong with a retrieved result; None counts it as delivered."""
        found = self._check.problem(number % VARIANTS, answer) if status == 200 else f"retrieve_future {status}"
        self.delivered += found is None
        return found

    async def sample(self, connection: Connection, number: int) -> str | None:
        """None, or what went wrong. Raises OSError."""
        wanted, refused = await self.submit(connection, number)
        if wanted is None:
            return refused
        return self.problem(number, *await self.retrieve(connection, wanted))

    def counts(self) -> dict[str, int]:
        lost = self.accepted - self.delivered
        return {"accepted": self.accepted, "lost": lost, "polls": self.polls, "told_to_wait": self.told_to_wait}
