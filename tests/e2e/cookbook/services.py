"""Programs beside the server that a recipe asks while it runs: started on free ports, and ended with the block."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx

from skyrl.runtime.processes.supervision import dies_with_parent

START_S = 60.0


@contextmanager
def service(command: Sequence[str], url: str, log: Path) -> Iterator[None]:
    """Run the command; inside, `url` answers. Raises AssertionError with the command's output if it does not."""
    with log.open("wb") as file:
        process = subprocess.Popen(dies_with_parent(command), stdout=file, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + START_S
        while not _answers(url):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        yield
    finally:
        process.terminate()
        process.wait()


def _answers(url: str) -> bool:
    """Whether an HTTP server is there, whatever it says."""
    try:
        httpx.get(url, trust_env=False)
    except httpx.TransportError:
        return False
    return True
