"""208 training bodies of 3.3 MB arrive at once and must wait: other requests go on, and no process holds or decodes all
bodies."""

from __future__ import annotations

import http.client
import json
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import closing, contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import zstandard

from benchmarks.processes import parts_of, peak_resident_mb
from skyrl.base.wire import tinker_pb2 as pb
from skyrl.base.wire.training import PROTOBUF
from skyrl.cli.demo.server import DemoServer
from tests.servers import SLOW_START_S

BODIES = 208
BODY_BYTES = 3_300_000
PERIOD_S = 0.01
"""Seconds between two heartbeats."""
CONTENT = np.random.default_rng(0).bytes(BODY_BYTES // 2)


class Client:
    """One connection with one API key. `post` raises RuntimeError for a status other than 200 and 408."""

    def __init__(self, port: int, key: str) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        self._headers = {"X-API-Key": key}

    def post(self, route: str, body: bytes | dict[str, Any], **headers: str) -> bytes:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        self._connection.request("POST", f"/api/v1/{route}", content, {**self._headers, **named})
        answer = self._connection.getresponse()
        content = answer.read()
        if answer.status not in (200, 408):
            raise RuntimeError(f"{route}: {answer.status} {content[:200]!r}")
        return content

    def close(self) -> None:
        self._connection.close()

    def result(self, request_id: str) -> bytes:
        while b"try_again" in (content := self.post("retrieve_future", {"request_id": request_id})):
            pass
        return content

    def submit(self, route: str, body: bytes | dict[str, Any], **headers: str) -> str:
        return json.loads(self.post(route, body, **headers))["request_id"]

    def create_model(self) -> tuple[str, str]:
        """Create a session and a model in it; returns their ids when the model exists."""
        session = json.loads(self.post("create_session", {"tags": [], "sdk_version": "0"}))["session_id"]
        body = {"session_id": session, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 8}}
        return session, json.loads(self.result(self.submit("create_model", body)))["model_id"]


@contextmanager
def repeated(action: Callable[[], object], period_s: float) -> Iterator[list[float]]:
    """Inside the block `action` runs again and again on its own thread; the list gets the seconds of each run."""
    seconds: list[float] = []
    stop = threading.Event()

    def run() -> None:
        while not stop.wait(period_s):
            began = time.perf_counter()
            action()
            seconds.append(time.perf_counter() - began)

    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(run)
        try:
            yield seconds
        finally:
            stop.set()
            running.result()


@pytest.fixture(scope="module")
def trainer() -> Iterator[DemoServer]:
    """A server without vLLM. No test samples, so the upstream may be a port that refuses connections. The files are
    deleted at the end."""
    with tempfile.TemporaryDirectory() as state:
        server = DemoServer(Path(state), "--external-inference-url", "http://127.0.0.1:9")
        server.start()
        try:
            server.wait_api(SLOW_START_S)
            yield server
        finally:
            server.stop()


def undecodable(model_id: str, seq_id: int) -> bytes:
    """A command with readable model and number and undecodable data, so that decoding fails."""
    tail = b"\xff" * (BODY_BYTES - len(CONTENT))
    data = CONTENT + tail
    field = b"\x1a" + _varint(len(data)) + data  # field 3: one invalid datum
    return pb.ForwardBackwardHeader(model_id=model_id, seq_id=seq_id).SerializeToString() + field


def _varint(number: int) -> bytes:
    groups: list[int] = []
    while True:
        groups.append(number & 0x7F | (0x80 if number > 0x7F else 0))
        number >>= 7
        if not number:
            return bytes(groups)


class SendingProcess:
    """Threads that send one body each, in a separate process, so that heartbeats are timed in an undisturbed
    process."""

    bodies: ClassVar[list[bytes]] = []

    @classmethod
    def prepare(cls, model_id: str) -> None:
        """Compress every second body, and in advance: a hundred compressing threads would take both cores from the
        server."""
        # number 1 is missing, so none can run
        plain = [undecodable(model_id, seq_id) for seq_id in range(2, BODIES + 2)]
        cls.bodies = [zstandard.compress(body, 1) if number % 2 else body for number, body in enumerate(plain)]

    @classmethod
    def send(cls, port: int) -> tuple[list[str], float]:
        """Send all bodies at the same time; returns their request ids and the seconds until all were accepted."""

        def send_one(number: int) -> str:
            encoding = "zstd" if number % 2 else "identity"
            with closing(Client(port, "tml-test")) as sender:
                return sender.submit(
                    "forward_backward", cls.bodies[number], content_type=PROTOBUF, content_encoding=encoding
                )

        with ThreadPoolExecutor(BODIES) as threads:
            began = time.perf_counter()
            return list(threads.map(send_one, range(BODIES))), time.perf_counter() - began


@pytest.fixture(scope="module")
def before(trainer: DemoServer) -> dict[str, float]:
    """Peak memory of the processes before any large body, in MB."""
    with closing(Client(trainer.port, "tml-first")) as client:
        client.create_model()  # the engine has loaded the base model then
    return {name: peak_resident_mb(pid) for name, pid in parts_of(trainer.pid).items()}


@pytest.mark.slow
def test_waiting_large_bodies_do_not_delay_other_requests(trainer: DemoServer, before: dict[str, float]) -> None:
    """Half of the bodies are compressed."""
    with closing(Client(trainer.port, "tml-test")) as client, closing(Client(trainer.port, "tml-test")) as heart:
        session, model_id = client.create_model()
        parts = parts_of(trainer.pid)

        with ProcessPoolExecutor(1, get_context("spawn")) as process:
            process.submit(SendingProcess.prepare, model_id).result()
            sending = process.submit(SendingProcess.send, trainer.port)
            with repeated(lambda: heart.post("session_heartbeat", {"session_id": session}), PERIOD_S) as beats:
                request_ids, elapsed_s = sending.result()
        assert len(set(request_ids)) == BODIES
        waited = {quantile: float(np.quantile(beats, quantile)) / elapsed_s for quantile in (0.5, 0.95, 1.0)}
        bounds = {0.5: 0.05, 0.95: 0.35, 1.0: 0.5}
        assert all(waited[quantile] < bound for quantile, bound in bounds.items()), (
            f"a heartbeat waits for a few of them, not for all: {waited} of {elapsed_s:.1f} s"
        )
        assert parts_of(trainer.pid) == parts, "no process died"
        grown = {name: peak_resident_mb(pid) - before[name] for name, pid in parts.items()}
        assert max(grown.values()) < BODIES * BODY_BYTES / 2**20 / 2, f"no process holds them all: {grown}"

        with pytest.raises(RuntimeError, match="^retrieve_futures: 400"):  # the connection still works
            client.post("retrieve_futures", {})
        missing = {"model_id": model_id, "seq_id": 1, "adam_params": {"learning_rate": 1e-4}}
        assert "metrics" in json.loads(client.result(client.submit("optim_step", missing)))
        first = json.loads(client.result(request_ids[0]))
        assert first["category"] == "user", "the body is decoded only when its turn has come"
        assert "not a ForwardBackwardRequest" in first["error"]
        client.post(f"sessions/{session}/finish", {})
