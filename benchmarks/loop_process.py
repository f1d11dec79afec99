"""The process of one checkout in `benchmarks.loop_cost`: the event loop of an API process whose clients and whose
vLLM are in the same process, on transports without sockets.

Usage: python -P loop_process.py IN_FLIGHT, in a checkout. For each line on standard input it sends SAMPLES samples and
prints the CPU time of its thread in µs per sample.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import uvloop
from uvicorn.config import Config
from uvicorn.server import ServerState

from benchmarks import null_upstream
from benchmarks.prompts import VARIANTS, prompt
from skyrl.base.config.server import ServerConfig
from skyrl.runtime.processes.runtime import Runtime
from skyrl.runtime.web.server import tune_garbage_collection
from skyrl.server.api.app import create_app
from skyrl.server.api.server import open_services
from skyrl.server.api.whole_request import protocol_with
from skyrl.server.sampling.http import HttpTransport
from skyrl.storage.db import migrate
from skyrl.storage.db.database import Database
from skyrl.storage.db.engine_state import publish_training, publish_url

SAMPLES = 1_500
PROMPT_TOKENS, MAX_TOKENS = 512, 64
KEY = "tml-bench"
HEADERS = b"".join(
    [
        b"host: 127.0.0.1:8000\r\n",
        b"x-api-key: %s\r\n" % KEY.encode(),
        b"content-type: application/json\r\n",
        b"accept: application/x-protobuf\r\n",
        *(b"x-stainless-%d: value-%d\r\n" % (number, number) for number in range(12)),  # as many as the SDK sends
    ]
)
ANSWER = null_upstream.completion(1, MAX_TOKENS, 0)


class Transport:
    """Stands for a socket. What a protocol writes goes to `take` in the next turn of the event loop."""

    def __init__(self, protocol: Any) -> None:
        self.protocol = protocol
        self._loop = asyncio.get_running_loop()
        self._closing = False
        protocol.connection_made(self)

    def write(self, data: bytes) -> None:
        self._loop.call_soon(self.take, data)

    def take(self, data: bytes) -> None:
        raise NotImplementedError

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return {"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)}.get(name, default)

    def is_closing(self) -> bool:
        return self._closing

    def abort(self) -> None:
        self._closing = True

    def close(self) -> None:
        self._closing = True

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, *_: int) -> None: ...
    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...


class Vllm(Transport):
    """vLLM's end of a connection: the same answer to each request."""

    def take(self, data: bytes) -> None:
        self.protocol.data_received(ANSWER)


class Load:
    """The samples of a round, which the clients share."""

    def __init__(self, sampler: str) -> None:
        params = {"max_tokens": MAX_TOKENS, "seed": 1, "temperature": 1.0, "top_k": -1, "top_p": 1.0}
        head = {"num_samples": 1, "prompt": {"chunks": [{"type": "encoded_text", "tokens": "PROMPT"}]}}
        text = json.dumps({**head, "sampling_params": params, "sampling_session_id": sampler, "seq_id": "NUMBER"})
        self._body = text.replace('"PROMPT"', "%s").replace('"NUMBER"', "%d").encode()
        self._prompts = [json.dumps(prompt(variant, PROMPT_TOKENS)).encode() for variant in range(VARIANTS)]
        self._sent = self._most = self._left = 0
        self.ended = asyncio.Event()

    def begin(self) -> None:
        self._most, self._left = self._sent + SAMPLES, SAMPLES
        self.ended.clear()

    def next_body(self) -> bytes | None:
        if self._sent == self._most:
            return None
        self._sent += 1
        return self._body % (self._prompts[self._sent % VARIANTS], self._sent)

    def end_one(self) -> None:
        self._left -= 1
        if not self._left:
            self.ended.set()


class Client(Transport):
    """A client that sends a sample, then asks for its result, then sends the next one."""

    def __init__(self, protocol: Any, load: Load) -> None:
        self._load = load
        self._has_asked = False
        super().__init__(protocol)

    def begin(self) -> None:
        if (body := self._load.next_body()) is not None:
            self._has_asked = False
            self._post(b"asample", body)

    def take(self, data: bytes) -> None:
        if not data.startswith(b"HTTP/1.1 200"):
            raise SystemExit(f"the server answered {data!r}")
        if self._has_asked:
            self._load.end_one()
            self.begin()
        else:
            self._has_asked = True
            request_id = json.loads(data.partition(b"\r\n\r\n")[2])["request_id"]
            self._post(b"retrieve_future", b'{"request_id": "%s"}' % request_id.encode())

    def _post(self, path: bytes, body: bytes) -> None:
        head = b"POST /api/v1/%s HTTP/1.1\r\n%scontent-length: %d\r\n\r\n" % (path, HEADERS, len(body))
        self.protocol.data_received(head + body)


async def open_sampler(app: Any) -> str:
    headers = {"X-API-Key": KEY}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://api", headers=headers) as http:
        session = (await http.post("/api/v1/create_session", json={})).json()["session_id"]
        wanted = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny"}
        return (await http.post("/api/v1/create_sampling_session", json=wanted)).json()["sampling_session_id"]


async def serve(directory: Path, in_flight: int) -> None:
    async def connect(_origin: object, make: Any, _deadline: float) -> Any:
        return Vllm(make()).protocol

    HttpTransport._open = staticmethod(connect)  # pyright: ignore[reportAttributeAccessIssue]
    database = Database(f"sqlite:///{directory / 'loop.db'}")
    migrate.migrate(database)
    database.write(lambda c: publish_url(c, "http://127.0.0.1:9"))
    database.write(lambda c: publish_training(c, ready=True, reason="", vocab_size=4096, max_context=2048))
    config = ServerConfig(  # pyright: ignore[reportCallIssue]  # it knows no defaults of pydantic's settings
        base_model="tiny", state_dir=directory, database_url=database.url
    )
    async with open_services(Runtime(config, directory, None, "key", cuda=False)) as services:
        app = create_app(services)
        web = Config(app, log_config=None)
        web.load()
        state, make = ServerState(), protocol_with(app)
        load = Load(await open_sampler(app))
        clients = [Client(make(config=web, server_state=state, app_state={}), load) for _ in range(in_flight)]
        tune_garbage_collection()
        while sys.stdin.readline():
            load.begin()
            began = time.thread_time()
            for client in clients:
                client.begin()
            await load.ended.wait()
            print((time.thread_time() - began) / SAMPLES * 1e6, flush=True)
        for client in clients:
            client.protocol.connection_lost(None)
    database.close()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="skyrl-loop-") as temporary:
        uvloop.run(serve(Path(temporary), int(sys.argv[1])))
