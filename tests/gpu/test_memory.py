"""Memory of the device that runs out during an optimizer step and during a pass; and the memory and speed of a model
with 0.6 billion parameters.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from skyrl.base.types.weights import LoraSpec
from skyrl.trainer.protocol import AdamParams, OutOfMemory, PassResult, TrainingPass
from skyrl.trainer.ranks.lora_backend import LoraBackend
from tests.failures import FailingOperation
from tests.gpu.figures import FIGURES, Column
from tests.gpu.support import DEVICE, LARGE, REHEARSAL, backend_on, build, ok, texts, wait
from tests.local_ranks import rank_of

MIB = 2**20
STEP = AdamParams(learning_rate=1e-3, weight_decay=0.1, grad_clip_norm=1.0)
VOCAB = LARGE["vocab_size"]
SEQUENCE = 1024 if not REHEARSAL else 64


@contextmanager
def _memory_left(bytes_left: int) -> Any:
    """Inside the block the allocator can get only `bytes_left` more than it holds now."""
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, (torch.cuda.memory_reserved() + bytes_left) / total))
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


class _NoLargeTensors(TorchDispatchMode):
    """Lack of memory in a rehearsal: an operation that makes a tensor of more than `elements` raises."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self._elements = elements

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.numel() > self._elements:
            raise torch.OutOfMemoryError("too large, injected")
        return result


def _train(model_id: str, seed: int, *lengths: int) -> TrainingPass:
    return TrainingPass(model_id, texts(seed, VOCAB, *lengths), "cross_entropy")


def _copy_of(backend: LoraBackend, model_id: str) -> list[Tensor | int | None]:
    adapter = rank_of(backend).adapters[model_id]
    tensors = (adapter.weights, adapter.exp_avg, adapter.exp_avg_sq, adapter.gradient)
    return [*(None if one is None else one.cpu().clone() for one in tensors), adapter.step]


def _equal(one: list[Tensor | int | None], other: list[Tensor | int | None]) -> bool:
    return all(
        torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a == b
        for a, b in zip(one, other, strict=True)
    )


def _shortages(buffer_bytes: int) -> list[Callable[[], AbstractContextManager[Any]]]:
    """Shortages of memory, the worst first. On a GPU the allocator has room for 0 to 3.2 buffers of the adapter's
    size."""
    if REHEARSAL:
        return [lambda at=at: FailingOperation(at, allocating=True) for at in range(0, 8)]
    return [lambda room=room: _memory_left(int(room * buffer_bytes)) for room in (0, 0.6, 1.2, 1.8, 2.4, 3.2)]


def test_a_step_that_runs_out_of_memory_anywhere_changes_nothing(bases: Path) -> None:
    backend = backend_on(build(LARGE, bases), merge=True)
    for model_id in ("m", "control"):
        backend.create_model(model_id, LoraSpec(64, 32.0, 1))
    for seed in range(2):
        (first,) = ok(backend.run([_train("m", seed, 40)]))
        del first
        adapters = rank_of(backend).adapters
        assert (gradient := adapters["m"].gradient) is not None
        adapters["control"].gradient = gradient.clone()
        if seed == 0:
            for model_id in ("m", "control"):
                backend.optim_step(model_id, STEP)
    before = _copy_of(backend, "m")
    buffer_bytes = rank_of(backend).adapters["m"].weights.nbytes
    failures = 0
    for shortage in _shortages(buffer_bytes):
        try:
            with shortage():
                backend.optim_step("m", STEP)
        except OutOfMemory:
            failures += 1
            assert _equal(_copy_of(backend, "m"), before)
            continue
        break
    FIGURES.record("an optimizer step: lacks of memory survived", failures)
    # on a GPU a segment that the allocator still has may hold the chunk
    assert failures >= (1 if REHEARSAL else 0), "the chunk of a step"
    if rank_of(backend).adapters["m"].step == 1:
        backend.optim_step("m", STEP)
    backend.optim_step("control", STEP)
    for tensor, expected in zip(_copy_of(backend, "m"), _copy_of(backend, "control"), strict=True):
        if isinstance(tensor, Tensor):
            torch.testing.assert_close(tensor, expected, rtol=1e-6, atol=0)


def test_a_pass_that_runs_out_of_memory_fails_alone_and_frees_its_memory(bases: Path) -> None:
    """A small pass of another model shares the micro-batch and succeeds."""
    backend = backend_on(build(LARGE, bases), merge=True, budget=64 * SEQUENCE)
    for model_id in ("small", "large"):
        backend.create_model(model_id, LoraSpec(8, 32.0, 1))
    ok(backend.run([_train("small", 0, 16), _train("large", 0, 16)]))  # makes the allocations that happen only once
    before = _copy_of(backend, "large")
    wait()
    shortage = _NoLargeTensors(5_000_000) if REHEARSAL else _memory_left(1024 * MIB)
    with shortage:
        small, large = backend.run([_train("small", 1, 16), _train("large", 1, *[SEQUENCE] * 48)])
    assert isinstance(small, PassResult)
    assert isinstance(large, OutOfMemory)
    assert _equal(_copy_of(backend, "large"), before)
    ok(backend.run([_train("large", 2, SEQUENCE)]))


def test_a_pass_without_memory_for_its_layers_runs_again_and_recomputes_them(bases: Path) -> None:
    """On a GPU the choice sees the free memory of the whole device, not that the allocator may take only 5 GiB more: 8
    sequences keep some 15 GiB, and 1 to 3 with recomputed layers."""
    backend = backend_on(build(LARGE, bases), budget=8 * SEQUENCE)
    backend.create_model("m", LoraSpec(8, 32.0, 1))
    ok(backend.run([_train("m", 0, 128)]))  # tells what a row needs
    recomputation = rank_of(backend).base.packed.recomputation
    assert recomputation is not None
    recomputed: list[bool] = []
    inner = recomputation.pays

    def noted(rows: int) -> bool:
        recomputed.append(inner(rows))
        return recomputed[-1]

    with patch.object(recomputation, "pays", noted), FailingOperation(200) if REHEARSAL else _memory_left(5120 * MIB):
        ok(backend.run([_train("m", 1, *[SEQUENCE] * 8)]))
    assert len(recomputed) == 1, "asked once, then forced"
    assert recomputation._recomputes
    FIGURES.record("layers are recomputed after a lack of memory, not from the start", not recomputed[0])


def _timed(work: Callable[[], object], times: int) -> float:
    """The median of the seconds that `work` takes, after one uncounted run."""
    work()
    taken = []
    for _ in range(times):
        wait()
        started = time.perf_counter()
        work()
        wait()
        taken.append(time.perf_counter() - started)
    return sorted(taken)[times // 2]


@pytest.mark.parametrize("merge", [False, True], ids=["alone", "merged"])
def test_memory_after_passes_and_steps_is_bounded_and_speed_is_recorded(
    bases: Path, tmp_path: Path, merge: bool
) -> None:
    """Four models; one large pass and many small ones. Times have no bound and are recorded as figures."""
    name: Column = "merged" if merge else "alone"
    times = 3 if REHEARSAL else 5
    started = time.perf_counter()
    backend = backend_on(build(LARGE, bases), merge=merge, budget=8 * SEQUENCE)
    FIGURES.record("seconds to load", time.perf_counter() - started, name)
    for number in range(4):
        backend.create_model(f"m{number}", LoraSpec(32, 32.0, number))
    large = [_train("m0", 1, *[SEQUENCE] * 8)]
    small = [_train(f"m{number % 4}", number, *[64] * 2) for number in range(16)]
    ok(backend.run(large))
    wait()
    before = torch.cuda.memory_allocated() if DEVICE == "cuda" else 0
    with nullcontext() if REHEARSAL else _peak(f"one pass of {8 * SEQUENCE} tokens, MiB at most", name):
        seconds = _timed(lambda: ok(backend.run(large)), times)
    FIGURES.record(f"one pass of {8 * SEQUENCE} tokens, tokens/s", 8 * SEQUENCE / seconds, name)
    seconds = _timed(lambda: ok(backend.run(small)), times)
    FIGURES.record("16 passes of 128 tokens of four models, tokens/s", 16 * 128 / seconds, name)
    step_s = []
    for number in range(4):
        wait()
        started = time.perf_counter()
        backend.optim_step(f"m{number}", STEP)
        wait()
        step_s.append(time.perf_counter() - started)
    FIGURES.record("an optimizer step of rank 32, seconds", sorted(step_s)[2], name)
    started = time.perf_counter()
    backend.save_state("m0", tmp_path)
    FIGURES.record("saving a state of rank 32, seconds", time.perf_counter() - started, name)
    state_mib = sum(file.stat().st_size for file in tmp_path.iterdir()) / MIB
    FIGURES.record("a state of rank 32, MiB", state_mib, name)
    if DEVICE == "cuda":  # since `before`, the backend allocated three gradients and four pairs of moments
        held = sum(
            moments.nbytes
            for adapter in rank_of(backend).adapters.values()
            for moments in (adapter.exp_avg, adapter.exp_avg_sq)
            if moments is not None
        )
        assert torch.cuda.memory_allocated() <= before + held + 64 * MIB
    assert rank_of(backend).adapters["m0"].step == 1


@contextmanager
def _peak(what: str, column: Column) -> Any:
    torch.cuda.reset_peak_memory_stats()
    yield
    FIGURES.record(what, torch.cuda.max_memory_allocated() / MIB, column)
