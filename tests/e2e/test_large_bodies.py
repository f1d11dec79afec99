"""208 training bodies of 3.3 MB that come at once and must wait: others go on, nobody holds or decodes them all."""

from __future__ import annotations

import http.client
import json
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import zstandard

from skyrl.demo.server import DemoServer
from skyrl.wire import tinker_pb2 as pb
from skyrl.wire.training import PROTOBUF

BODIES = 208
BODY_BYTES = 3_300_000
CONTENT = np.random.default_rng(0).bytes(BODY_BYTES // 2)


@pytest.fixture
def trainer() -> Iterator[DemoServer]:
    """A server without vLLM: nobody samples, so its upstream may be a port that refuses. Leaves no gigabyte behind."""
    with tempfile.TemporaryDirectory() as state:
        server = DemoServer(Path(state), "--external-inference-url", "http://127.0.0.1:9")
        server.start()
        try:
            server.wait_api(120)
            yield server
        finally:
            server.stop()


class Client:
    """One connection; `post` gives the answer's status and its JSON."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)

    def post(self, route: str, body: bytes | dict[str, Any], **headers: str) -> tuple[int, dict[str, Any]]:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        named = {"X-API-Key": "tml-test"} | {name.replace("_", "-"): value for name, value in headers.items()}
        self._connection.request("POST", f"/api/v1/{route}", content, named)
        answer = self._connection.getresponse()
        return answer.status, json.loads(answer.read())

    def ok(self, route: str, body: bytes | dict[str, Any], **headers: str) -> dict[str, Any]:
        status, said = self.post(route, body, **headers)
        assert status == 200, said
        return said

    def outcome(self, request_id: str) -> dict[str, Any]:
        while (answer := self.post("retrieve_future", {"request_id": request_id}))[0] == 408:
            pass
        assert answer[0] == 200
        return answer[1]

    def close(self) -> None:
        self._connection.close()


def undecodable(model_id: str, seq_id: int) -> bytes:
    """A command whose model and number can be read, and whose data cannot: who decodes it, notices."""
    tail = b"\xff" * (BODY_BYTES - len(CONTENT))
    data = CONTENT + tail
    field = b"\x1a" + _varint(len(data)) + data  # field 3: one datum, which is none
    return pb.ForwardBackwardHeader(model_id=model_id, seq_id=seq_id).SerializeToString() + field


def _varint(number: int) -> bytes:
    groups: list[int] = []
    while True:
        groups.append(number & 0x7F | (0x80 if number > 0x7F else 0))
        number >>= 7
        if not number:
            return bytes(groups)


@contextmanager
def repeated(action: Callable[[], object]) -> Iterator[list[float]]:
    """Runs `action` over and over on a thread of its own; the list gets the seconds of each."""
    seconds: list[float] = []
    stop = threading.Event()

    def run() -> None:
        while not stop.wait(0.005):
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


def memory_of(server: DemoServer) -> dict[str, int]:
    """The most that each of the server's processes ever held, in bytes."""
    peaks = {}
    for process in psutil.Process(server.pid).children(recursive=True):
        status = Path(f"/proc/{process.pid}/status").read_text()
        peaks[process.cmdline()[-1]] = int(status.partition("VmHWM:")[2].split()[0]) * 1024
    return peaks


@pytest.mark.parametrize("encoding", ["identity", "zstd"])
def test_large_bodies_that_wait_hold_nobody_up(trainer: DemoServer, encoding: str) -> None:
    client = Client(trainer.port)
    session = client.ok("create_session", {"tags": [], "sdk_version": "0"})["session_id"]
    wanted = {"session_id": session, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 4}}
    model_id = client.outcome(client.ok("create_model", wanted)["request_id"])["model_id"]
    before = memory_of(trainer)

    def send(seq_id: int) -> str:
        body = undecodable(model_id, seq_id)
        body = zstandard.compress(body, 1) if encoding == "zstd" else body
        sender = Client(trainer.port)
        try:
            sent = sender.ok("forward_backward", body, content_type=PROTOBUF, content_encoding=encoding)
        finally:
            sender.close()
        return sent["request_id"]

    heart = Client(trainer.port)
    with (
        repeated(lambda: heart.ok("session_heartbeat", {"session_id": session})) as beats,
        ThreadPoolExecutor(BODIES) as senders,
    ):
        began = time.perf_counter()
        request_ids = list(senders.map(send, range(2, BODIES + 2)))  # number 1 is missing: none of them can run
        took = time.perf_counter() - began
    assert len(set(request_ids)) == BODIES
    assert float(np.quantile(beats, 0.99)) < 0.2 * took, "a heartbeat waits for a few of them, not for all"
    grown = {name: peak - before[name] for name, peak in memory_of(trainer).items()}
    assert set(grown) == set(before), "nobody died"
    assert max(grown.values()) < BODIES * BODY_BYTES / 2, f"no process holds them all: {grown}"

    assert client.post("retrieve_futures", {})[0] == 400, "the connection still answers"
    missing = {"model_id": model_id, "seq_id": 1, "adam_params": {"learning_rate": 1e-4}}
    assert "metrics" in client.outcome(client.ok("optim_step", missing)["request_id"])
    first = client.outcome(request_ids[0])
    assert first["category"] == "user", "decoded when its turn has come, and not before"
    assert "not a ForwardBackwardRequest" in first["error"]
    client.ok(f"sessions/{session}/finish", {})
    heart.close()
    client.close()
