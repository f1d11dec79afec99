"""The smallest rows of the benchmark of training run on the device, and its ways train the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import trainer
from benchmarks.trainer_rows import FULL
from tests.gpu.figures import FIGURES, Column
from tests.gpu.support import DEVICE, NUMERICS, build

pytest.importorskip("peft", reason="needs PEFT (pip install peft)")
ROWS = ("tenants-16", "tenants-64")
COLUMNS: dict[str, Column] = {"peft": "beside", "skyrl": "alone", "skyrl-merged": "merged"}


@pytest.mark.parametrize("name", ROWS)
def test_the_smallest_rows_are_measured(name: str, bases: Path) -> None:
    """Logprobs are float32 of bfloat16 logits on CUDA: they agree to some hundredths."""
    (row,) = (row for row in FULL if row.name == name)
    ways = ("peft", "peft-packed", "skyrl", "skyrl-merged")
    found = trainer.measure(build(NUMERICS, bases), row, ways, rounds=1, threads=1, clock="wall")
    assert [result["way"] for result in found] == list(ways)
    for result in found:
        assert result["logprob_gap"] < (0.1 if DEVICE == "cuda" else 1e-3)
        if column := COLUMNS.get(result["way"]):
            FIGURES.record(f"the small model, {row.what}: tokens/s", result["tokens_per_s"], column)
