"""Rows about restarts: seconds until a server is ready, and until its models train again, after a clean stop and after
SIGKILL, beside a start with an empty state directory.

A real server with the tiny model and vLLM. Two tenants train before each end; no snapshot is taken while they train, so
a killed server has all their commands to repeat.
"""

from __future__ import annotations

import os
import signal
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import tinker
from tinker import types

from benchmarks.stage import Stage, ready_server
from benchmarks.table import Row, Target
from skyrl.cli.demo.server import DemoServer

ROUNDS, QUICK_ROUNDS = 3, 1
STEPS, QUICK_STEPS = 40, 10
MORE_S = 5.0
"""How much longer than a cold start a start after a clean stop may take."""
FLAGS = ("--snapshot-interval-s", "3600")
SEQUENCES, TOKENS = 8, 512
PATIENCE_S = 900.0


def restarts(stage: Stage) -> list[Row]:
    """ "direct" is a start with an empty state directory."""
    rounds, steps = (QUICK_ROUNDS, QUICK_STEPS) if stage.quick else (ROUNDS, STEPS)
    _cold()  # reads all files once
    seconds: dict[str, list[float]] = defaultdict(list)
    for _ in range(rounds):
        seconds["cold"].append(_cold())
        for way in ("stop", "kill"):
            for name, value in _restart(way, steps).items():
                seconds[f"{way}: {name}"].append(value)
    stage.raw.append({"row": "restarts", "steps": steps, "seconds": dict(seconds)})
    cold = statistics.median(seconds["cold"])
    what = {
        "stop: ready": "ready after a clean stop",
        "stop: trains": "a model's first pass after a clean stop",
        "kill: ready": "ready after SIGKILL",
        "kill: other": "a new model's first pass after SIGKILL",
        "kill: trains": "a model's first pass after SIGKILL",
    }
    return [
        Row(
            "restarts",
            what[name],
            "s",
            statistics.median(seconds[name]),
            Target(cold + MORE_S) if name.endswith("ready") else None,
            cold,
            note=f"{min(seconds[name]):.1f} to {max(seconds[name]):.1f}; {2 * steps} steps to repeat, of "
            f"{seconds[f'{name[:4]}: trained'][0]:.0f} s",
        )
        for name in what
    ]


def _cold() -> float:
    with ready_server(*FLAGS, seconds=PATIENCE_S) as server:
        return server.ready_s


def _restart(way: str, steps: int) -> dict[str, float]:
    """Seconds of the training before the restart, and after its beginning."""
    with ready_server(*FLAGS, seconds=PATIENCE_S) as server, ExitStack() as opened:
        clients = [opened.enter_context(_client(server, number)) for number in range(2)]
        began = time.monotonic()
        for number in range(steps):
            for client in clients:
                client.forward_backward(_data(number), "cross_entropy")
                client.optim_step(types.AdamParams(learning_rate=1e-3))
        for client in clients:
            client.forward(_data(0), "cross_entropy").result()
        found = {"trained": time.monotonic() - began}
        if way == "stop":
            server.stop()
        else:
            os.kill(server.pid, signal.SIGKILL)  # the launcher; its processes end with it
            time.sleep(3.0)
        began = time.monotonic()
        server.start()
        found["ready"] = server.wait_ready(PATIENCE_S)
        found["other"] = _seconds(began, lambda: _new_model(server, opened))
        found["trains"] = _seconds(began, lambda: clients[0].forward(_data(1), "cross_entropy").result())
    return found


def _seconds(began: float, work: Callable[[], object]) -> float:
    work()
    return time.monotonic() - began


def _new_model(server: DemoServer, opened: ExitStack) -> None:
    opened.enter_context(_client(server, 9)).forward_backward(_data(0), "cross_entropy").result()


@contextmanager
def _client(server: DemoServer, number: int) -> Iterator[Any]:
    """A training client of a tenant of its own."""
    with tinker.ServiceClient(base_url=server.url, api_key=f"tml-tenant-{number}") as service:
        yield service.create_lora_training_client(base_model="tiny", rank=16, seed=number).result()


def _data(seed: int) -> list[types.Datum]:
    rng = np.random.default_rng(seed)
    texts = rng.integers(0, 512, (SEQUENCES, TOKENS + 1)).tolist()
    return [
        types.Datum(
            model_input=types.ModelInput.from_ints(text[:-1]),
            loss_fn_inputs={"target_tokens": types.TensorData(data=text[1:], dtype="int64", shape=[TOKENS])},
        )
        for text in texts
    ]
