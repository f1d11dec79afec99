"""Sends one sample, directly to the upstream or through a Tinker server, on a connection of the caller."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import urlsplit

from benchmarks.checks import AnswerCheck
from benchmarks.connection import Connection
from benchmarks.prompts import MAX_TOKENS, PROMPT_TOKENS, VARIANTS, prompt

MODEL = "tiny"
HEADERS = b"X-API-Key: tml-bench\r\nContent-Type: application/json\r\nAccept: application/x-protobuf\r\n"
FIRST_BACK_OFF_S, LONGEST_BACK_OFF_S = 0.05, 2.0


@dataclass(frozen=True)
class LoadSpec:
    """`pid`: the server process whose CPU is measured. `upstream_pid`: the upstream's process. `spread_s`: the samples
    in flight begin evenly over this time. So a load on a slow upstream need not first lose the bunch in which it would
    begin."""

    url: str
    path: Literal["direct", "tinker"]
    in_flight: int
    seconds: float
    warm_up_s: float = 1.0
    sequences: int = 1
    spread_s: float = 0.0
    pid: int | None = None
    upstream_pid: int | None = None


class _Samples:
    def __init__(self, spec: LoadSpec) -> None:
        address = urlsplit(spec.url)
        self._host, self._port = address.hostname or "127.0.0.1", address.port or 80
        self._sequences = spec.sequences
        self._check = AnswerCheck(spec.sequences, MAX_TOKENS)
        self._prompts = [json.dumps(prompt(index, PROMPT_TOKENS)).encode() for index in range(VARIANTS)]

    def connect(self) -> Connection:
        return Connection(self._host, self._port, HEADERS)


class DirectSamples(_Samples):
    """Samples by the upstream's /v1/completions."""

    async def open(self) -> None:
        body = {"model": MODEL, "prompt": "PROMPT", "n": self._sequences, "max_tokens": MAX_TOKENS}
        text = json.dumps(body | {"logprobs": 0, "return_token_ids": True})
        self._body = text.replace('"PROMPT"', "%s").encode()

    async def sample(self, connection: Connection, number: int) -> str | None:
        """Send a sample and wait for its result; returns the fault, or None. Raises OSError."""
        variant = number % VARIANTS
        status, answer = await connection.post(b"/v1/completions", self._body % self._prompts[variant])
        return self._check.problem(variant, answer) if status == 200 else f"completions {status}"

    def counts(self) -> dict[str, int]:
        return {}


class TinkerSamples(_Samples):
    """Samples by asample and retrieve_future, on a sampling session that `open` creates."""

    def __init__(self, spec: LoadSpec) -> None:
        super().__init__(spec)
        self.session = ""
        self.accepted = self.delivered = self.polls = self.told_to_wait = 0

    async def open(self) -> None:
        """Create the session and the sampling session. Raises RuntimeError with the server's message if it refuses."""
        setup = self.connect()
        self.session = await self.new_session(setup)
        body = {"session_id": self.session, "sampling_session_seq_id": 0, "base_model": MODEL}
        sampler = (await self._create(setup, "sampling_session", body))["sampling_session_id"]
        setup.close()
        params = {"max_tokens": MAX_TOKENS, "seed": 1, "temperature": 1.0, "top_k": -1, "top_p": 1.0}
        prompt = {"chunks": [{"type": "encoded_text", "tokens": "PROMPT"}]}
        sample = {"num_samples": self._sequences, "prompt": prompt, "sampling_params": params}
        sample |= {"sampling_session_id": sampler, "type": "sample", "seq_id": "NUMBER"}
        text = json.dumps(sample).replace("%", "%%")
        self._body = text.replace('"PROMPT"', "%s").replace('"NUMBER"', "%d").encode()

    async def new_session(self, connection: Connection) -> str:
        """The id of a session. Raises as `open` does."""
        body = {"sdk_version": "0.38.0", "tags": [], "user_metadata": {}}
        return (await self._create(connection, "session", body))["session_id"]

    async def _create(self, connection: Connection, what: str, body: dict[str, Any]) -> dict[str, Any]:
        path = f"/api/v1/create_{what}"
        status, answer = await connection.post(path.encode(), json.dumps({**body, "type": f"create_{what}"}).encode())
        if status != 200:
            raise RuntimeError(f"{path}: {status} {answer[:300].decode(errors='replace')}")
        return json.loads(answer)

    async def heartbeat(self, connection: Connection) -> int:
        """Send a heartbeat; returns the status."""
        body = json.dumps({"session_id": self.session, "type": "session_heartbeat"}).encode()
        return (await connection.post(b"/api/v1/session_heartbeat", body))[0]

    async def submit(self, connection: Connection, number: int) -> tuple[bytes | None, str | None]:
        """Submit a sample; returns the body of the poll for its result, or the fault. Waits after each 429. Raises
        OSError."""
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

    async def retrieve(self, connection: Connection, poll: bytes) -> tuple[int, bytes]:
        """Poll until the answer is not "try again"; returns its status and body. Raises OSError."""
        while True:
            self.polls += 1
            status, answer = await connection.post(b"/api/v1/retrieve_future", poll)
            if status != 408 and not (status == 200 and b'"try_again"' in answer[:200]):
                return status, answer

    def problem(self, number: int, status: int, answer: bytes) -> str | None:
        """The fault of a retrieved result. A result without a fault counts as delivered."""
        problem = self._check.problem(number % VARIANTS, answer) if status == 200 else f"retrieve_future {status}"
        self.delivered += problem is None
        return problem

    async def sample(self, connection: Connection, number: int) -> str | None:
        """Send a sample and wait for its result; returns the fault, or None. Raises OSError."""
        poll, problem = await self.submit(connection, number)
        if poll is None:
            return problem
        return self.problem(number, *await self.retrieve(connection, poll))

    def counts(self) -> dict[str, int]:
        lost = self.accepted - self.delivered
        return {"accepted": self.accepted, "lost": lost, "polls": self.polls, "told_to_wait": self.told_to_wait}
