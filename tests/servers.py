"""A server for the tests of one module or one test: started, ready, and ended with the block that uses it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx

from skyrl.base.tiny import vision
from skyrl.cli.demo.server import DemoServer
from tests.second_model import make_second

SLOW_START_S = 500.0
"""Seconds until a server must be ready, on a busy machine."""
Server = TypeVar("Server", bound=DemoServer)


@contextmanager
def ready(server: Server) -> Iterator[Server]:
    """Start `server`. Inside, it can train and sample. At the end it is stopped, also if it did not become ready."""
    server.start()
    try:
        server.wait_ready(SLOW_START_S)
        yield server
    finally:
        server.stop()


def wait_all(server: DemoServer) -> None:
    """Wait until each of the server's several base models is ready: the server is ready with the first."""
    deadline = time.monotonic() + SLOW_START_S
    while True:
        models = httpx.get(f"{server.url}/readyz", trust_env=False).json()["base_models"]
        if all(model["ready"] for model in models.values()):
            return
        assert time.monotonic() < deadline, models
        time.sleep(0.05)


def student_and_teacher(directory: Path, **teachers: Any) -> DemoServer:
    """A server of two base models, not started: the tiny one, under the name `student`, and another one with the same
    tokenizer, `teacher`, that is only sampled from. `directory / "teacher"` has the teacher. `teachers` are more keys
    of its entry."""
    teacher = {"base_model": str(make_second(directory / "teacher")), "served_model_names": ["teacher"]}
    entries = [
        {"base_model": "tiny", "served_model_names": ["student"]},
        {**teacher, "uses": ["sample"], **teachers},
    ]
    return DemoServer(directory / "server", "--base-models", json.dumps(entries))


def seeing_server(directory: Path, *names: str) -> DemoServer:
    """A server of the tiny model that sees, under these names, not started. `directory / "model"` has the model."""
    model = directory / "model"
    model.mkdir(parents=True)
    vision.make(model)
    served = (part for name in names for part in ("--served-model-name", name))
    return DemoServer(directory / "server", "--base-model", str(model), *served)
