"""Round trips of training commands through the real server and SDK: submit to result, tiny model, one CPU core.

Usage: python benchmarks/training.py [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tinker
from tinker import types

from skyrl.demo.latency import stream_data
from skyrl.demo.server import DemoServer

ADAM = types.AdamParams(learning_rate=1e-4)


def timed(what: str, repeats: int, action: Callable[[], object]) -> dict[str, Any]:
    action()
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - began)
    p50, p95 = np.quantile(seconds, [0.5, 0.95]) * 1e3
    row = {"what": what, "p50_ms": round(float(p50), 1), "p95_ms": round(float(p95), 1)}
    print(json.dumps(row), flush=True)
    return row


def measure(base_url: str) -> list[dict[str, Any]]:
    with tinker.ServiceClient(base_url=base_url, api_key="tml-bench") as client:
        trainer = client.create_lora_training_client(base_model="tiny", rank=8).result()

        def both(data: list[types.Datum]) -> None:
            passed, stepped = trainer.forward_backward(data, "cross_entropy"), trainer.optim_step(ADAM)
            passed.result()
            stepped.result()

        small = stream_data(1, 8)
        rows = [
            timed("forward_backward, 1 x 8", 40, lambda: trainer.forward_backward(small, "cross_entropy").result()),
            timed("optim_step", 40, lambda: trainer.optim_step(ADAM).result()),
        ]
        for sequences, length, repeats in ((1, 8, 40), (8, 128, 20), (32, 256, 8)):
            data = stream_data(sequences, length)
            rows.append(timed(f"both, {sequences} x {length}", repeats, lambda data=data: both(data)))
        rows.append(
            timed(
                "save_weights_and_get_sampling_client",
                20,
                lambda: trainer.save_weights_and_get_sampling_client().result(),
            )
        )
        return rows


def run() -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as state:
        server = DemoServer(Path(state))
        server.start()
        try:
            server.wait_ready()
            return measure(server.url)
        finally:
            server.stop()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    out = parser.parse_args().out
    found = run()
    if out is not None:
        out.write_text(json.dumps(found, indent=1) + "\n")
