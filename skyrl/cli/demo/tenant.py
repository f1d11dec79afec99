"""What a tenant's process runs. It leaves the terminal before it imports anything that takes time."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path


def live(pipe: Connection, task: str, key: str, log: Path) -> None:
    """For each order that comes, send a Step after every step, and then the run's seconds, until the other end is
    closed."""
    os.setsid()
    with log.open("ab") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    os.environ["TINKER_API_KEY"] = key

    import tinker

    from skyrl.base.tiny.corpus import TASKS
    from skyrl.cli.demo.rl import train

    pipe.send("up")
    with suppress(EOFError):
        while True:
            base_url, base_model, settings = pipe.recv()
            with tinker.ServiceClient(base_url=base_url) as service:
                began = time.perf_counter()
                train(service, base_model, TASKS[task], settings, pipe.send)
                pipe.send(time.perf_counter() - began)
