"""208 training bodies of 3.3 MB that come at once and must wait: others go on, nobody holds or decodes them all."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import zstandard

from benchmarks.payloads import BODIES, PERIOD_S, Client, repeated
from benchmarks.processes import parts_of, peak_resident_mb
from skyrl.demo.server import DemoServer
from skyrl.wire import tinker_pb2 as pb
from skyrl.wire.training import PROTOBUF

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


@pytest.mark.parametrize("encoding", ["identity", "zstd"])
def test_large_bodies_that_wait_hold_nobody_up(trainer: DemoServer, encoding: str) -> None:
    with closing(Client(trainer.port, "tml-test")) as client, closing(Client(trainer.port, "tml-test")) as heart:
        session, model_id = client.model()
        parts = parts_of(trainer.pid)
        before = {name: peak_resident_mb(pid) for name, pid in parts.items()}

        def send(seq_id: int) -> str:
            body = undecodable(model_id, seq_id)
            body = zstandard.compress(body, 1) if encoding == "zstd" else body
            with closing(Client(trainer.port, "tml-test")) as sender:
                return sender.submit("forward_backward", body, content_type=PROTOBUF, content_encoding=encoding)

        with (
            repeated(lambda: heart.post("session_heartbeat", {"session_id": session}), PERIOD_S) as beats,
            ThreadPoolExecutor(BODIES) as senders,
        ):
            began = time.perf_counter()
            request_ids = list(senders.map(send, range(2, BODIES + 2)))  # number 1 is missing: none of them can run
            took = time.perf_counter() - began
        assert len(set(request_ids)) == BODIES
        assert float(np.quantile(beats, 0.99)) < 0.2 * took, "a heartbeat waits for a few of them, not for all"
        assert parts_of(trainer.pid) == parts, "nobody died"
        grown = {name: peak_resident_mb(pid) - before[name] for name, pid in parts.items()}
        assert max(grown.values()) < BODIES * BODY_BYTES / 2**20 / 2, f"no process holds them all: {grown}"

        with pytest.raises(RuntimeError, match="^retrieve_futures: 400"):  # the connection still answers
            client.post("retrieve_futures", {})
        missing = {"model_id": model_id, "seq_id": 1, "adam_params": {"learning_rate": 1e-4}}
        assert "metrics" in json.loads(client.result(client.submit("optim_step", missing)))
        first = json.loads(client.result(request_ids[0]))
        assert first["category"] == "user", "decoded when its turn has come, and not before"
        assert "not a ForwardBackwardRequest" in first["error"]
        client.post(f"sessions/{session}/finish", {})
