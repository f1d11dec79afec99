"""How fast the device trains Qwen3-0.6B's shape beside PEFT, and how long the host keeps the device waiting.

Speeds have no bound; they are recorded as figures.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks import trainer
from benchmarks.operation_counts import Operations
from benchmarks.trainer_rows import FULL, SMALL
from skyrl.base.types.weights import LoraSpec
from skyrl.trainer.protocol import TrainingPass
from tests.gpu.figures import FIGURES, Column
from tests.gpu.support import DEVICE, LARGE, REHEARSAL, backend_on, build, ok, texts, wait
from tests.local_ranks import rank_of

ROWS = ("uniform-32x256", "grpo-4x16", "tenants-1024") if not REHEARSAL else ("uniform-2x64", "grpo-1x8", "tenants-16")
COLUMNS: dict[str, Column] = {"peft": "beside", "skyrl": "alone", "skyrl-merged": "merged"}
LENGTHS = (128, 1024, 8192) if not REHEARSAL else (32, 64)


@pytest.mark.parametrize("name", ROWS)
def test_06b_beside_peft(name: str, bases: Path) -> None:
    """Each row is written when it is known. MFU: `benchmarks.trainer_flops`, of bfloat16 without sparsity."""
    pytest.importorskip("peft", reason="needs PEFT (pip install peft)")
    row = next(row for row in (*FULL, *SMALL) if row.name == name)
    ways = [way for way in COLUMNS if way != "skyrl-merged" or row.merges]
    found = trainer.measure(build(LARGE, bases), row, ways, rounds=2, threads=1, clock="wall")
    for result in found:
        column = COLUMNS[result["way"]]
        assert result["logprob_gap"] < (0.1 if DEVICE == "cuda" else 1e-3)
        FIGURES.record(f"{row.what}: tokens/s", result["tokens_per_s"], column)
        FIGURES.record(f"{row.what}: MiB above the model at most", result["peak_mib"], column)
        for key, of in (("mfu", "all tokens"), ("mfu_of_rows", "computed rows")):
            if key in result:
                FIGURES.record(f"{row.what}: MFU of {of}", result[key], column)


@pytest.mark.parametrize("tokens", LENGTHS)
def test_how_long_the_device_computes(tokens: int, bases: Path) -> None:
    """One pass, as sequences of at most 256 tokens: its time without the profiler, and with it what the host starts
    and how long the device computes. A device that computes for less than the pass takes waits for the host."""
    backend = backend_on(build(LARGE, bases), budget=max(LENGTHS))
    backend.create_model("m", LoraSpec(32, 32.0, 1))
    data = texts(1, LARGE["vocab_size"], *[min(tokens, 256)] * (tokens // min(tokens, 256)))

    def run() -> None:
        ok(backend.run([TrainingPass("m", data, "cross_entropy")]))
        wait()

    run()
    started = time.perf_counter()
    run()
    seconds = time.perf_counter() - started
    operations, device_s = _work_of(run)
    of = f"a pass of {tokens:,} tokens"
    FIGURES.record(f"{of}: ms", 1000 * seconds)
    FIGURES.record(f"{of}: operations that the host starts", operations)
    FIGURES.record(f"{of}: the same per layer", operations / LARGE["num_hidden_layers"])
    FIGURES.record(f"{of}: µs per operation", 1e6 * seconds / operations)
    assert operations > 0
    if DEVICE == "cuda":
        FIGURES.record(f"{of}: part of the time in which the device computes", device_s / seconds)
        FIGURES.record(f"{of}: times the host waits for the device", _waits_of(run))
        assert 0 < device_s < 2 * seconds


def test_a_micro_batch_of_the_size_that_is_chosen_fits_without_recomputed_layers(bases: Path) -> None:
    backend = backend_on(build(LARGE, bases), budget=None)
    backend.create_model("m", LoraSpec(32, 32.0, 1))
    rows = backend.micro_batch_tokens
    FIGURES.record("a micro-batch has at most so many tokens", rows)
    recomputation = rank_of(backend).base.packed.recomputation
    assert recomputation is not None
    free = recomputation.free()
    held = 0
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
    length = min(1024, LARGE["max_position_embeddings"])
    started = time.perf_counter()
    ok(backend.run([TrainingPass("m", texts(1, LARGE["vocab_size"], *[length] * (rows // length)), "cross_entropy")]))
    wait()
    FIGURES.record("such a micro-batch: tokens/s of the first pass", rows / (time.perf_counter() - started))
    assert not recomputation._recomputes
    if DEVICE == "cuda":
        used = torch.cuda.max_memory_allocated() - held
        FIGURES.record("such a micro-batch: part of the free memory at most (the rule: 1/3 and logits)", used / free)
        FIGURES.record("such a micro-batch: bytes of a row, by the rule", int(recomputation.bytes_of_row))
        FIGURES.record("such a micro-batch: bytes of a row, at the peak", int(used / rows))
        assert used < free


def _work_of(run: Callable[[], None]) -> tuple[int, float]:
    """Kernels and copies of the device, and their seconds. In a rehearsal the operations that `benchmarks.operations`
    counts."""
    if DEVICE == "cpu":
        with Operations() as operations:
            run()
        return sum(counts.total() for counts in operations.counts.values()), 0.0
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as profiled:
        run()
    events = profiled.events() or []
    kernels = [event for event in events if "CUDA" in str(event.device_type) and not event.is_user_annotation]
    return len(kernels), sum(event.self_device_time_total for event in kernels) / 1e6


def _waits_of(run: Callable[[], None]) -> int:
    """How often an operation makes the host wait, by torch's own warnings (an explicit synchronize is none)."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")  # else the mode's own warning, that it is a prototype, is an error
        try:
            torch.cuda.set_sync_debug_mode("warn")
            run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("called a synchronizing CUDA operation" in str(warning.message) for warning in caught)
