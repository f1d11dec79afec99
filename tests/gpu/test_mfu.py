"""The MFU of Qwen3-0.6B's and Qwen3-8B's shapes, with micro-batches of what the memory holds; and eight tenants beside
one.

Weights are drawn on the device: no file of 16 GB is written. Speeds have no bound; they are recorded as figures, beside
what `benchmarks.roofline` expects of them.
"""

from __future__ import annotations

import gc
import json
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.cards import card_here
from benchmarks.on_meta import make_config
from benchmarks.trainer_flops import model_flops
from benchmarks.trainer_rows import FULL, OF_GPU, SMALL, BatchRow, tokens_of
from benchmarks.trainer_ways import SkyrlWay
from skyrl.trainer.ranks import sharded_model
from tests.gpu.figures import FIGURES, Column
from tests.gpu.support import DEVICE, NUMERICS, REHEARSAL, SETTINGS, wait

MODELS = {"0.6b": 4.0, "8b": 30.0}
"""GiB that must be free: the weights, and micro-batches of some thousand rows."""
ROWS = ("uniform-32x256", "uniform-8x2048", "tenants-8") if not REHEARSAL else ("uniform-2x64", "tenants-16")
STEPS = 2


def _settings(model: str, directory: Path) -> str:
    """A directory with config.json alone."""
    path = directory / f"drawn-{model}"
    if REHEARSAL:
        values: dict[str, Any] = dict(NUMERICS)
        AutoConfig.for_model(values.pop("model_type"), **values).save_pretrained(path)
        return str(path)
    return make_config(path, model)


def _drawn(path: str, dtype: torch.dtype, **options: Any) -> Any:
    """In place of the weights of files: random ones, drawn on the device."""
    torch.manual_seed(7)
    with torch.device(DEVICE):
        return AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(path), dtype=dtype, attn_implementation="eager"
        )


def _seconds(path: str, row: BatchRow) -> float:
    """Of a step of the row. The first steps are not measured."""
    vocabulary = json.loads((Path(path) / "config.json").read_text())["vocab_size"]
    with patch.object(sharded_model, "load_model", _drawn):
        way = SkyrlWay(path, 1, merge=row.merges, config={"trainer.micro_batch_tokens": None, **SETTINGS})
    try:
        way.start(row.passes(vocabulary))
        for _ in range(2):
            way.step()
        wait()
        started = time.perf_counter()
        for _ in range(STEPS):
            way.step()
        wait()
        return (time.perf_counter() - started) / STEPS
    finally:
        way.close()


@pytest.mark.parametrize("model", MODELS)
def test_mfu(model: str, bases: Path) -> None:
    if DEVICE == "cuda" and torch.cuda.mem_get_info()[0] < MODELS[model] * 2**30:
        pytest.skip(f"needs {MODELS[model]:.0f} GiB of free memory")
    path = _settings(model, bases)
    card = card_here()
    rates: dict[str, float] = {}
    for name in ROWS:
        row = next(row for row in (*FULL, *OF_GPU, *SMALL) if row.name == name)
        passes = row.passes(json.loads((Path(path) / "config.json").read_text())["vocab_size"])
        seconds = _seconds(path, row)
        rates[name] = tokens_of(passes) / seconds
        column: Column = "merged" if row.merges else "alone"
        FIGURES.record(f"{model}, {row.what}: tokens/s", rates[name], column)
        if card is not None:
            mfu = model_flops(path, passes) / seconds / card.peak(torch.bfloat16)
            FIGURES.record(f"{model}, {row.what}: MFU of all tokens", mfu, column)
        gc.collect()  # layers hold themselves in circles: else the next row's micro-batches had less memory
        if DEVICE == "cuda":
            torch.cuda.empty_cache()
    if "tenants-8" in rates:
        part = rates["tenants-8"] / rates["uniform-32x256"]
        FIGURES.record(f"{model}, eight tenants merged: part of one tenant's tokens/s", part, "merged")
    assert min(rates.values()) > 0
