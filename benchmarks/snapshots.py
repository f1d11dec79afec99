"""Rows about snapshots: how long a snapshot keeps the backend thread from training, and how many bytes it writes.

Runs in this process, without a server, with the real backend, database and disk.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.series import quantile
from benchmarks.stage import Stage
from benchmarks.table import Row
from skyrl.base.config.loading import load_config
from skyrl.base.tiny import model_path
from skyrl.base.types.weights import LoraSpec
from skyrl.engine.snapshots import Snapshots
from skyrl.storage.db.claims import claim, read_claim
from skyrl.storage.db.database import Database, Fence, FencedDatabase
from skyrl.storage.db.migrate import migrate
from skyrl.trainer.protocol import AdamParams, Datum, TrainingPass
from skyrl.trainer.ranks.lora_backend import LoraBackend

RANKS = (8, 32)
REPEATS = 20
OWNER = "benchmark"


def snapshots(stage: Stage) -> list[Row]:
    repeats, rows = REPEATS // 4 if stage.quick else REPEATS, []
    with tempfile.TemporaryDirectory(prefix="skyrl-snapshots-") as state_dir:
        config = load_config({"state_dir": Path(state_dir), "base_model": str(model_path())})
        with contextlib.closing(Database(config.database)) as plain:
            migrate(plain)
            plain.write(lambda c: claim(c, OWNER, read_claim(c)))
        with contextlib.closing(FencedDatabase(config.database, Fence(OWNER))) as database:
            backend = LoraBackend(config)
            taking = Snapshots(config, database, backend)
            for rank in RANKS:
                spent, size = _take(f"rank-{rank}", rank, repeats, backend, taking)
                stage.raw.append({"row": "snapshots", "rank": rank, "milliseconds": spent, "bytes": size})
                note = f"p95 {quantile(spent, 0.95):.1f} ms, {size / 1e6:.2f} MB"
                rows.append(Row("snapshots", f"one snapshot, rank {rank}, p50", "ms", quantile(spent, 0.5), note=note))
    return rows


def _take(model_id: str, rank: int, repeats: int, backend: LoraBackend, taking: Snapshots) -> tuple[list[float], int]:
    """The milliseconds of each snapshot, and the bytes of one, with weights, moments and a pending gradient."""
    tokens = np.arange(9)
    some_pass = TrainingPass(model_id, [Datum(tokens[:-1], {"target_tokens": tokens[1:]})], "cross_entropy")
    backend.create_model(model_id, LoraSpec(rank, 32.0, seed=1))
    backend.run([some_pass])
    backend.optim_step(model_id, AdamParams())
    backend.run([some_pass])
    spent: list[float] = []
    for next_seq in range(1, repeats + 1):
        began = time.perf_counter()
        taking.take(model_id, next_seq)
        spent.append((time.perf_counter() - began) * 1e3)
    return spent, sum(file.stat().st_size for file in taking.path(model_id, repeats).iterdir())
