"""CUDA graphs of layers without attention, and of whole passes: as right as the plain functions, how much faster, and
their memory.

The layers without attention have the widths of Qwen3-0.6B, 28 of them, and an adapter of rank 32 on one product. In a
rehearsal graphs are emulated, and layers are small.
"""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from skyrl.base.types.weights import LoraSpec
from skyrl.trainer.graphs.pieces import Graphs, Piece, Results
from skyrl.trainer.graphs.recorder import CudaRecorder
from skyrl.trainer.graphs.row_classes import RowClasses
from skyrl.trainer.protocol import TrainingPass
from tests.gpu.figures import FIGURES
from tests.gpu.support import DEVICE, LARGE, REHEARSAL, backend_on, build, distance, ok, texts, wait
from tests.graph_emulator import EmulatedGraphs
from tests.graphed_layers import Layers, plainly
from tests.local_ranks import rank_of

LENGTHS = (128, 8192) if not REHEARSAL else (16, 24)
ROUNDS = 5 if not REHEARSAL else 1
RANK = 32


def _layers() -> Layers:
    if REHEARSAL:
        return Layers(torch.bfloat16)
    return Layers(torch.bfloat16, hidden=1024, inner=3072, size=128, count=28, device=DEVICE)


def _graphs() -> Graphs:
    device = torch.device(DEVICE)
    recorder = EmulatedGraphs() if REHEARSAL else CudaRecorder(device)
    return Graphs(recorder, RowClasses(LENGTHS), device, most_bytes=40e9, warm_up=0)


@torch.no_grad()
def test_graphs_compute_what_the_plain_functions_do() -> None:
    """On rows padded to the class, because other shapes have other kernels. Rows, contents and adapters change between
    replays; classes change, too."""
    layers, graphs = _layers(), _graphs()
    less = LENGTHS[0] - 5
    for seed, rows in enumerate((less, LENGTHS[0], LENGTHS[1] - 3, less, LENGTHS[1])):
        leaves, batch = layers.adapter(seed % 2, RANK), layers.batch(rows, seed)
        found = [each.clone() for each in layers.graphed(graphs, leaves, batch)]
        more = (LENGTHS[0] if rows <= LENGTHS[0] else LENGTHS[1]) - rows
        padded = [torch.nn.functional.pad(each, (0, 0, 0, more)) for each in batch]
        for number, (one, other) in enumerate(zip(found, layers.whole(plainly, leaves, padded), strict=True)):
            expected = (other[:rows] if number < 2 else other).float()
            assert (one.float() - expected).norm() <= 0.01 * expected.norm()
    assert graphs.counts.captured == 3 * 2 * layers.count  # the small class again after the large one
    assert graphs.counts.plain == 0
    FIGURES.record("graphs of 28 layers without attention, two classes: MiB", graphs.held_bytes // 2**20)
    FIGURES.record("the same: MiB of them for what is between operations", graphs.recorder.held_bytes // 2**20)


@pytest.mark.parametrize("rows", LENGTHS)
@torch.no_grad()
def test_tokens_per_second_with_and_without_graphs(rows: int) -> None:
    layers, graphs = _layers(), _graphs()
    leaves, batch = layers.adapter(0, RANK), layers.batch(rows, 0)
    layers.graphed(graphs, leaves, batch)
    ways: dict[str, Callable[[], object]] = {
        "without graphs": lambda: layers.whole(plainly, leaves, batch),
        "with graphs": lambda: layers.graphed(graphs, leaves, batch),
    }
    for name, way in ways.items():
        way()
        wait()
        started = time.perf_counter()
        for _ in range(ROUNDS):
            way()
        wait()
        speed = ROUNDS * rows / (time.perf_counter() - started)
        FIGURES.record(f"28 layers without attention, {rows:,} tokens, {name}: tokens/s", speed)
    assert graphs.counts.captured == 2 * layers.count


@pytest.mark.parametrize("rows", LENGTHS)
def test_whole_passes_with_and_without_graphs(rows: int, bases: Path) -> None:
    """Gradients on rows that fill their class, and tokens/s. The first pass is measured, and has no graphs."""
    backend = backend_on(build(LARGE, bases), budget=max(LENGTHS))
    packed, data = rank_of(backend).base.packed, texts(1, LARGE["vocab_size"], *[min(rows, 256)] * -(-rows // 256))
    packed.layer_graphs = None

    def run(name: str) -> Tensor:
        backend.create_model(name, LoraSpec(RANK, 32.0, 1))
        ok(backend.run([TrainingPass(name, data, "cross_entropy")]))
        gradient = rank_of(backend).adapters[name].gradient.clone()
        wait()
        started = time.perf_counter()
        for _ in range(ROUNDS):
            ok(backend.run([TrainingPass(name, data, "cross_entropy")]))
        wait()
        speed = ROUNDS * rows / (time.perf_counter() - started)
        FIGURES.record(f"a pass of {rows:,} tokens, {name}: tokens/s", speed)
        return gradient

    run("first")
    plain, graphs = run("without graphs"), _graphs()
    assert packed.use_graphs(graphs)
    found = run("with graphs")
    assert graphs.counts.replayed == (ROUNDS + 1) * 4 * len(packed.decoder_layers)
    FIGURES.record(f"graphs of all layers, {rows:,} tokens: MiB", graphs.held_bytes // 2**20)
    FIGURES.record(f"gradients with graphs, {rows:,} tokens: distance", error := distance({"": found}, {"": plain}))
    assert error <= 0.01


@torch.no_grad()
def test_a_piece_that_waits_for_the_device_has_no_graph_and_leaves_no_memory() -> None:
    """Its capture fails. The next micro-batch drops what graphs hold."""
    if DEVICE == "cuda":
        torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved() if DEVICE == "cuda" else 0
    graphs, rows = _graphs(), torch.ones(LENGTHS[0], 4, device=DEVICE)
    piece = Piece("waits", lambda numbers, fixed, of_rows: Results([of_rows[0] * of_rows[0].sum().item()]))
    micro_batch = graphs.micro_batch(LENGTHS[0])
    assert micro_batch is not None
    places = weakref.ref(graphs.places)
    (found,) = micro_batch.run(piece, None, (), (rows,)).of_rows
    assert found.unique().tolist() == [4 * LENGTHS[0]]
    assert graphs.micro_batch(LENGTHS[0]) is None
    assert (graphs.counts.captured, graphs.held_bytes) == (0, 0)
    del micro_batch, found, rows
    gc.collect()
    assert places() is None
    if DEVICE == "cuda":
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() <= before
