"""Rows about training commands: the time from submit to result through the real server and SDK, with the tiny model on
one CPU core.

The server would forward samples to the null upstream, so no vLLM runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import tinker
from tinker import types

from benchmarks.series import quantile
from benchmarks.stage import Stage, trainer
from benchmarks.table import Row, Target
from skyrl.cli.demo.run import stream_data

ADAM = types.AdamParams(learning_rate=1e-4)
SIZES = ((1, 8, 40), (8, 128, 20), (32, 256, 8))
"""Number of sequences, tokens of each, and repeats."""
BOTH_MS = 20


def timed(repeats: int, action: Callable[[], object]) -> list[float]:
    """The milliseconds of each repeat, after one uncounted run."""
    action()
    spent: list[float] = []
    for _ in range(repeats):
        began = time.perf_counter()
        action()
        spent.append((time.perf_counter() - began) * 1e3)
    return spent


def _row(stage: Stage, what: str, spent: list[float], target: Target | None = None) -> Row:
    stage.raw.append({"row": "training", "path": what, "milliseconds": spent})
    note = f"p95 {quantile(spent, 0.95):.1f} ms"
    return Row("training", f"{what}, p50", "ms", quantile(spent, 0.5), target, note=note)


def _measure(stage: Stage, base_url: str) -> list[Row]:
    share = 2 if stage.quick else 1
    with tinker.ServiceClient(base_url=base_url, api_key="tml-bench") as client:
        model = client.create_lora_training_client(base_model="tiny", rank=8).result()

        def both(data: list[types.Datum]) -> None:
            training_pass, optimizer_step = model.forward_backward(data, "cross_entropy"), model.optim_step(ADAM)
            training_pass.result()
            optimizer_step.result()

        small = stream_data(1, 8)
        alone = timed(40 // share, lambda: model.forward_backward(small, "cross_entropy").result())
        step = timed(40 // share, lambda: model.optim_step(ADAM).result())
        rows = [_row(stage, "forward_backward, 1 × 8", alone), _row(stage, "optim_step", step)]
        for sequences, length, repeats in SIZES:
            data = stream_data(sequences, length)
            target = Target(BOTH_MS) if sequences == 1 else None
            spent = timed(repeats // share, lambda data=data: both(data))
            rows.append(_row(stage, f"both pipelined, {sequences} × {length}", spent, target))
    return rows


def training(stage: Stage) -> list[Row]:
    with trainer(stage.upstream) as server:
        return _measure(stage, server.url)
