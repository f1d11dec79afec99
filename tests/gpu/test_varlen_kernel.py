"""Attention in sequences by torch's kernel, `trainer.attention: varlen`: as exact as on grids, and how long both take.

In a rehearsal a reference in plain torch is in the kernel's place. Times have no bound; they are recorded as figures,
beside those on grids, `trainer.attention: sdpa`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from skyrl.base.types.weights import LoraSpec
from skyrl.trainer.attention import varlen
from skyrl.trainer.attention.packed_attention import PackedGroups, segments_attention
from skyrl.trainer.protocol import Datum, TrainingPass
from skyrl.trainer.ranks import sharded_model
from skyrl.trainer.ranks.lora_backend import LoraBackend
from skyrl.trainer.rows.packing import pack_alone
from tests.gpu.figures import FIGURES
from tests.gpu.support import ARCHITECTURES, DEVICE, REHEARSAL, backend_on, build, distance, gradient_of, ok, wait

HEADS, KV_HEADS, DIM = (16, 8, 128) if not REHEARSAL else (4, 2, 8)
"""Of Qwen3-0.6B."""
SLACK = 1.5
REPEATS = 10 if not REHEARSAL else 1
SCALE = 1 if not REHEARSAL else 16
"""By how much a rehearsal shortens sequences."""
NO_SPLIT = 10**9


@pytest.fixture(scope="module", autouse=True)
def kernel() -> None:
    lacks = varlen.missing_in_torch()
    if lacks is not None:
        pytest.skip(f"torch {torch.__version__} {lacks}")
    if REHEARSAL:
        from tests.unit.varlen_reference import use_reference  # needs what torch may lack

        use_reference()


def _sequences(groups: int, samples: int, prompt: int, answers: tuple[int, int]) -> list[Datum]:
    rng = np.random.default_rng(0)
    data = []
    for _ in range(groups):
        shared = rng.integers(0, 1000, prompt // SCALE)
        for length in rng.integers(answers[0] // SCALE, answers[1] // SCALE + 1, samples):
            data.append(Datum(np.concatenate([shared, rng.integers(0, 1000, length)]), {}))
    return data


BATCHES: dict[str, list[Datum]] = {
    "32 × 256": _sequences(1, 32, 0, (256, 256)),
    "8 × 2,048": _sequences(1, 8, 0, (2048, 2048)),
    "4 groups × 16, prompt 512, answers 32–64": _sequences(4, 16, 512, (32, 64)),
    "ragged, 32 × 16–1,024": _sequences(1, 32, 0, (16, 1024)),
}


def _states(rows: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator(DEVICE).manual_seed(1)
    made = [
        torch.randn(1, rows, heads, DIM, generator=generator, device=DEVICE).to(dtype)
        for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    ]
    return [*(each.transpose(1, 2).requires_grad_() for each in made[:3]), made[3]]


def _layer(groups: PackedGroups, states: list[Tensor], window: int | None = None) -> list[Tensor]:
    """The output, and the gradients of query, key and value."""
    *leaves, of_output = states
    output, _ = segments_attention(
        nn.Module(), *leaves, attention_mask=None, attention_groups=groups, sliding_window=window
    )
    return [output.detach(), *torch.autograd.grad(output, leaves, of_output)]


def _seconds(run: Callable[[], object]) -> float:
    run()
    wait()
    started = time.perf_counter()
    for _ in range(REPEATS):
        run()
    wait()
    return (time.perf_counter() - started) / REPEATS


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("window", [None, 100 // SCALE], ids=["all", "window"])
@pytest.mark.parametrize("copies", [varlen.SPLIT_COPIES, NO_SPLIT], ids=["by-the-rule", "copied"])
def test_one_layer_is_as_exact_as_on_grids(name: str, window: int | None, copies: int) -> None:
    """Beside float32 on grids. Where prefixes have a call of their own, the rows without one are sequences without
    keys."""
    packed = pack_alone(BATCHES[name], torch.device(DEVICE))
    grids, sequences = PackedGroups([packed.groups]), PackedGroups([packed.groups], varlen=True)
    rows = packed.stop
    with patch.object(varlen, "SPLIT_COPIES", copies):
        found = sequences.sequences(window, torch.device(DEVICE))
    if found is None or (copies == NO_SPLIT and not found.copied):
        pytest.skip("no rows are copied, or so many that grids are taken")
    exact = _layer(grids, _states(rows, torch.float32), window)
    states = _states(rows, torch.bfloat16)
    for right, one, other in zip(exact, _layer(sequences, states, window), _layer(grids, states, window), strict=True):
        errors = [float((each.float() - right).norm() / right.norm()) for each in (one, other)]
        assert 0 < errors[0] <= SLACK * errors[1]
    if window is not None:
        return
    what = f"attention of a layer forward and backward, {name}, ms"
    copied = "varlen, prefixes copied" if copies == NO_SPLIT else "varlen"
    FIGURES.record(f"{what}: {copied}", 1000 * _seconds(lambda: _layer(sequences, states)))
    if copies != NO_SPLIT:
        FIGURES.record(f"{what}: {copied}", 1000 * _seconds(lambda: _layer(grids, states)), "beside")


@pytest.mark.parametrize("kind", ["qwen3", "qwen2-window"])
def test_a_model_is_as_exact_as_on_grids(kind: str, bases: Path, tmp_path: Path) -> None:
    """And computes no attention otherwise."""
    path = build(ARCHITECTURES[kind], bases)
    rng = np.random.default_rng(3)
    prompt = rng.integers(0, 1000, 40)
    texts = [np.concatenate([prompt[: 40 * (number % 2)], rng.integers(0, 1000, 50 + number)]) for number in range(8)]
    data = [
        Datum(each[:-1], {"target_tokens": each[1:], "weights": np.ones(len(each) - 1, np.float32)}) for each in texts
    ]

    def gradient(backend: LoraBackend, name: str) -> dict[str, Tensor]:
        backend.create_model("m", LoraSpec(8, 32.0, 3))
        ok(backend.run([TrainingPass("m", data, "cross_entropy")]))
        return gradient_of(backend, "m", tmp_path / name)

    exact = gradient(backend_on(path, dtype=torch.float32), "exact")
    on_grids = distance(gradient(backend_on(path), "grids"), exact)
    with patch.object(sharded_model, "usable_on", lambda device: True if REHEARSAL else varlen.usable_on(device)):
        backend = backend_on(path, attention="varlen")
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiled:
        in_sequences = distance(gradient(backend, "sequences"), exact)
    names = {event.key for event in profiled.key_averages()}
    assert {"torch_attn::_varlen_attn", "torch_attn::_varlen_attn_backward"} <= names
    assert not any(name.startswith("aten::_scaled_dot_product_") for name in names)
    FIGURES.record(f"{kind}, distance of a gradient with varlen", in_sequences)
    FIGURES.record(f"{kind}, distance of a gradient with varlen", on_grids, "beside")
    assert in_sequences <= SLACK * on_grids
