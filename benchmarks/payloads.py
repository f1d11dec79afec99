"""Large training bodies: 208 bodies of 3.3 MB are queued at once, and other requests are timed meanwhile.

One tenant posts all bodies together for a model whose next command is missing, so all of them wait. Meanwhile the
benchmark times this tenant's heartbeats and another tenant's training.

Usage: python -m benchmarks.payloads [--out FILE]
"""

from __future__ import annotations

import argparse
import http.client
import itertools
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
import zstandard

from benchmarks.processes import cpu_seconds, disk_bytes, parts_of, peak_resident_mb, resident_mb
from skyrl.base.wire import tinker_pb2 as pb
from skyrl.base.wire.training import PROTOBUF
from skyrl.cli.demo.server import DemoServer

BODIES = 208
SEQUENCES, LENGTH = 640, 256
"""Sequences of one body, and tokens of each: 3.3 MB at 20 bytes per token."""
PERIOD_S = 0.01
"""Seconds between two heartbeats."""
WAITING_S = 5.0
"""Seconds for which other requests are timed after all bodies have arrived."""


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


def training_body(sequences: int, length: int) -> bytes:
    """The data of a ForwardBackwardRequest, without model and number; they can be appended."""
    rng = np.random.default_rng(0)
    message = pb.ForwardBackwardRequest(loss_fn="importance_sampling")
    for _ in range(sequences):
        datum = message.data.add()
        tokens = rng.integers(300, 500, length + 1)
        datum.model_input.add().encoded_text.tokens = tokens[:-1].astype(np.int32).tobytes()
        inputs = {
            "target_tokens": (tokens[1:].astype(np.int64), pb.INT64),
            "logprobs": (rng.normal(-5.0, 0.1, length).astype(np.float32), pb.FLOAT32),
            "advantages": (rng.normal(0.0, 1.0, length).astype(np.float32), pb.FLOAT32),
        }
        for name, (values, dtype) in inputs.items():
            datum.loss_fn_inputs[name].CopyFrom(pb.Tensor(dense=values.tobytes(), dtype=dtype, shape=values.shape))
    return message.SerializeToString()


def with_number(data: bytes, model_id: str, seq_id: int) -> bytes:
    """A complete request: concatenated protobuf messages are read as one."""
    return data + pb.ForwardBackwardRequest(model_id=model_id, seq_id=seq_id).SerializeToString()


@contextmanager
def repeated(action: Callable[[], object], period_s: float = 0.0) -> Iterator[list[float]]:
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


def _quantiles(what: str, seconds: list[float]) -> dict[str, Any]:
    p50, p99 = np.quantile(seconds, [0.5, 0.99]) * 1e3
    longest = max(seconds) * 1e3
    return {f"{what}_p50_ms": round(p50, 1), f"{what}_p99_ms": round(p99, 1), f"{what}_max_ms": round(longest, 1)}


def _training(port: int) -> Callable[[], None]:
    """A function that submits another tenant's forward_backward (1 sequence of 8 tokens) and optimizer step together
    and waits for both."""
    client = Client(port, "tml-bench-other")
    _, model_id = client.create_model()
    numbers, small = itertools.count(1), training_body(1, 8)

    def step() -> None:
        body = with_number(small, model_id, next(numbers))
        training_pass = client.submit("forward_backward", body, content_type=PROTOBUF)
        optimizer_step = client.submit("optim_step", {"model_id": model_id, "seq_id": next(numbers)})
        client.result(training_pass)
        client.result(optimizer_step)

    return step


def measure(server: DemoServer, encoding: str) -> dict[str, Any]:
    parts = parts_of(server.pid)
    tenant = Client(server.port, "tml-bench-large")
    session, model_id = tenant.create_model()
    data = training_body(SEQUENCES, LENGTH)
    bodies = [with_number(data, model_id, seq_id) for seq_id in range(2, BODIES + 2)]
    if encoding == "zstd":
        bodies = [zstandard.compress(body, 3) for body in bodies]
    resident = {name: resident_mb(pid) for name, pid in parts.items()}
    before = {name: cpu_seconds(pid) for name, pid in parts.items()}

    def send(body: bytes) -> str:
        return Client(server.port, "tml-bench-large").submit(
            "forward_backward", body, content_type=PROTOBUF, content_encoding=encoding
        )

    heartbeats, step = Client(server.port, "tml-bench-large"), _training(server.port)
    row: dict[str, Any] = {"what": f"{BODIES} bodies", "encoding": encoding, "body_mb": round(len(data) / 1e6, 2)}
    with (
        repeated(lambda: heartbeats.post("session_heartbeat", {"session_id": session}), PERIOD_S) as beats,
        repeated(step) as steps,
        ThreadPoolExecutor(BODIES) as senders,
    ):
        began = time.perf_counter()
        row["accepted"] = len(set(senders.map(send, bodies)))
        row["accepted_s"] = round(time.perf_counter() - began, 2)
        arriving = len(beats), len(steps)
        time.sleep(WAITING_S)
    row |= _quantiles("arriving_heartbeat", beats[: arriving[0]]) | _quantiles(
        "waiting_heartbeat", beats[arriving[0] :]
    )
    row |= _quantiles("arriving_training", steps[: arriving[1] + 1])
    row |= _quantiles("waiting_training", steps[arriving[1] + 1 :])
    for name, pid in parts.items():
        row[f"{name}_cpu_s"] = round(cpu_seconds(pid) - before[name], 2)
        row[f"{name}_resident_mb"] = round(resident_mb(pid) - resident[name])
        row[f"{name}_peak_mb"] = round(peak_resident_mb(pid))
    row["disk_mb"] = round(disk_bytes(server.state_dir) / 1e6)
    print(json.dumps(row), flush=True)
    return row


def run() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for encoding in ("identity", "zstd"):
        with tempfile.TemporaryDirectory() as state:
            # No client samples, so no vLLM is needed: the URL names a port that refuses connections.
            server = DemoServer(Path(state), "--external-inference-url", "http://127.0.0.1:9")
            server.start()
            try:
                server.wait_api()
                rows.append(measure(server, encoding))
            finally:
                server.stop()
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    out = parser.parse_args().out
    rows = run()
    if out is not None:
        out.write_text(json.dumps(rows, indent=1) + "\n")
