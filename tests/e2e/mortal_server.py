"""A server with processes that tests kill, an upstream that never gives the same answer twice, and a client that
repeats interrupted requests. No vLLM."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any, Self, TypeVar

import httpx
import psutil
from aiohttp import web

from skyrl.cli.demo.server import DemoServer
from skyrl.storage.db.database import Database
from tests.databases import hold_records, rows_in, url_of
from tests.servers import SLOW_START_S

WAIT_S = 300.0
VOCABULARY = 500
PROTOBUF, JSON = "application/x-protobuf", "application/json"
STEP = {"adam_params": {"learning_rate": 0.01}}
"""The body of an optim_step."""
T = TypeVar("T")


def insist(action: Callable[[], T]) -> T:
    """Repeat the action while the server's death interrupts it."""
    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            return action()
        except httpx.TransportError:
            assert time.monotonic() < deadline, "the server did not come back in time"
            time.sleep(0.02)


class MortalServer(DemoServer):
    """A server whose launcher starts a killed process again: after 0.5 s at first, later after the second death."""

    def api(self) -> psutil.Process:
        """The API process; waits until there is one."""
        return self._running("skyrl.api.server")[0]

    def engine(self) -> psutil.Process:
        """The engine process; waits until there is one."""
        return self._running("skyrl.engine.main")[0]

    def engine_of(self, name: str) -> psutil.Process:
        """The engine of one base model of several, by the end of its log's name."""
        for engine in self._running("skyrl.engine.main"):
            if os.readlink(f"/proc/{engine.pid}/fd/1").endswith(f"engine-{name}.log"):
                return engine
        raise AssertionError(f"the base model {name} has no engine")

    def apis(self, count: int) -> list[psutil.Process]:
        """The API processes, oldest first; waits until there are `count`."""
        return self._running("skyrl.api.server", count)

    def _running(self, module: str, count: int = 1) -> list[psutil.Process]:
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            found: list[psutil.Process] = []
            for process in psutil.Process(self.pid).children(recursive=True):
                with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                    if process.cmdline()[-1:] == [module]:
                        found.append(process)
            if len(found) >= count:
                return sorted(found, key=lambda process: process.pid)
            time.sleep(0.05)
        raise AssertionError(f"there are no {count} processes of {module}")

    def kill_api(self) -> None:
        """Send SIGKILL; return when the process is dead."""
        victim = self.api()
        victim.kill()
        victim.wait(WAIT_S)

    @contextmanager
    def commits_held(self) -> Iterator[None]:
        """Hold the write lock, so that nothing is committed inside the block."""
        with closing(Database(url_of(self.state_dir))) as database, database.writer.begin() as connection:
            hold_records(connection)
            yield

    def ask(self, query: str) -> list[tuple[Any, ...]]:
        return rows_in(url_of(self.state_dir), query)


@contextmanager
def running(*servers: MortalServer) -> Iterator[None]:
    """Inside, all servers are ready. They may share a database, whose tables the first one creates alone."""
    try:
        for server in servers:
            server.start()
            if server is servers[0]:
                server.wait_api(SLOW_START_S)
        for server in servers:
            server.wait_ready(SLOW_START_S)
        yield
    finally:
        for server in servers:
            server.stop()


class Client:
    """Plain HTTP requests in one session: a new session unless one is given. Threads may share a client."""

    def __init__(self, url: str, session: str | None = None) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=None)
        headers = {"X-API-Key": "tml-insistent"}
        self.http = httpx.Client(
            base_url=f"{url}/api/v1/", headers=headers, timeout=WAIT_S, trust_env=False, limits=limits
        )
        self.session: str = session or self.ok("create_session", {})["session_id"]

    def ok(self, path: str, body: Any) -> dict[str, Any]:
        """The answer, whose status must be 200. Raises httpx.TransportError when the server dies."""
        answer = self.http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def sampler(self) -> str:
        wanted = {"session_id": self.session, "sampling_session_seq_id": 0, "base_model": "tiny"}
        return self.ok("create_sampling_session", wanted)["sampling_session_id"]

    def sample(self, sampler: str, seq_id: int) -> dict[str, Any]:
        """Request a sample; returns the promise."""
        return self.ok("asample", self.sample_body(sampler, seq_id))

    @staticmethod
    def sample_body(sampler: str, seq_id: int) -> dict[str, Any]:
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7, seq_id % VOCABULARY]}]}
        params = {"max_tokens": 4}
        return {"sampling_session_id": sampler, "seq_id": seq_id, "prompt": prompt, "sampling_params": params}

    def result(
        self, request_id: str, on_first_bytes: Callable[[], object] = lambda: None, *, accept: str = PROTOBUF
    ) -> bytes:
        """The whole result, after as many polls as it takes. Raises httpx.TransportError when the server dies."""
        headers = {"X-Tinker-Request-Type": "Sample", "Accept": accept}
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            asked = {"request_id": request_id}
            with self.http.stream("POST", "retrieve_future", json=asked, headers=headers) as answer:
                if answer.status_code != 408:
                    on_first_bytes()
                    content = answer.read()
                    assert answer.status_code == 200, content
                    return content
        raise AssertionError("no result in time")

    def outcome(self, request_id: str) -> dict[str, Any]:
        """The result or the error, as JSON."""
        return json.loads(self.result(request_id, accept=JSON))

    def model(self, number: int) -> str:
        """Create a model and wait for it; returns its id. All models are alike."""
        wanted = {"session_id": self.session, "model_seq_id": number, "base_model": "tiny"}
        wanted |= {"lora_config": {"rank": 4, "seed": 1}}
        return self.outcome(self.ok("create_model", wanted)["request_id"])["model_id"]

    def close(self) -> None:
        self.http.close()


def training_pass(seed: int, count: int = 1, length: int = 9) -> dict[str, Any]:
    """The body of a forward_backward with `count` sequences of `length` tokens."""
    data = []
    for number in range(count):
        tokens = [(20 + seed + 7 * number + step) % VOCABULARY for step in range(length + 1)]
        inputs = {"target_tokens": {"data": tokens[1:], "dtype": "int64", "shape": [length]}}
        data.append({"model_input": {"chunks": [{"tokens": tokens[:-1]}]}, "loss_fn_inputs": inputs})
    return {"forward_backward_input": {"data": data, "loss_fn": "cross_entropy"}}


class Upstream:
    """Answers vLLM's completions and chats, which are streams of one event if asked for. Every answer differs. While
    held, answers wait."""

    def __init__(self) -> None:
        self.url = ""
        self.answered = 0
        self._numbers = itertools.count()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="upstream", daemon=True)
        self._open = asyncio.Event()
        self._open.set()

    def hold(self) -> None:
        self._loop.call_soon_threadsafe(self._open.clear)

    def release(self) -> None:
        self._loop.call_soon_threadsafe(self._open.set)

    def await_answers(self, count: int) -> None:
        """Wait until so many requests have been answered."""
        deadline = time.monotonic() + WAIT_S
        while self.answered < count:
            assert time.monotonic() < deadline, f"{self.answered} of {count} requests were answered"
            time.sleep(0.01)

    async def _complete(self, request: web.Request) -> web.Response:
        asked = await request.json()
        await self._open.wait()
        number = next(self._numbers)
        tokens = [number // VOCABULARY % VOCABULARY, number % VOCABULARY, 3, 4]
        logprobs = {"token_logprobs": [-1.0] * len(tokens)}
        choice = {"index": 0, "text": "", "finish_reason": "length", "token_ids": tokens, "logprobs": logprobs}
        self.answered += 1
        answer = {"id": str(number), "model": asked["model"], "choices": [choice], "usage": None}
        if asked["stream"]:
            text = f"data: {json.dumps(answer)}\n\ndata: [DONE]\n\n"
            return web.Response(text=text, content_type="text/event-stream")
        return web.json_response(answer)

    async def _well(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _start(self) -> None:
        app = web.Application()
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/v1/chat/completions", self._complete)
        app.router.add_get("/{probe:.*}", self._well)
        self._runner = web.AppRunner(app, shutdown_timeout=0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0]
        self.url = f"http://{host}:{port}"

    def __enter__(self) -> Self:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(WAIT_S)
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(WAIT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
