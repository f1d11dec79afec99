"""Whole passes whose plain decoder layers run as graphs, emulated on the CPU, beside the same passes without graphs:
other rows, tenants and contents in each micro-batch, one adapter or a stack."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_lora_support import assert_close, assert_same, grpo, make_backend, ok, rl, saved, sft, spec, train

from benchmarks.operations import as_on_cuda
from skyrl.base.config.server import ConfigError
from skyrl.base.types.weights import LoraSpec
from skyrl.trainer.graphs import pieces
from skyrl.trainer.graphs.pieces import Graphs
from skyrl.trainer.graphs.recorder import Compute, Recorder
from skyrl.trainer.graphs.row_classes import RowClasses
from skyrl.trainer.protocol import AdamParams, OutOfMemory, TrainingPass
from skyrl.trainer.ranks.lora_backend import LoraBackend
from tests.graph_emulator import EmulatedGraphs
from tests.local_ranks import rank_of

CLASSES = RowClasses((33, 64, 136))
PIECES = 2 * 4
"""Of two layers, forward and backward."""
STEP = AdamParams(0.01, weight_decay=0.1)
SPECS = {
    "a": spec(8),
    "b": spec(4, 1),
    "attention": LoraSpec(8, 16.0, 2, train_mlp=False, train_unembed=False),
    "mlp": LoraSpec(4, 16.0, 3, train_attn=False, train_unembed=False),
    "ranks": LoraSpec(8, 16.0, 4, rank_pattern=(("self_attn.k_proj", 3), ("mlp.*", 5))),
}
STACKED = {"c": spec(8, 5, train_unembed=False), "d": spec(4, 6, train_unembed=False)}
"""Grouped products in bfloat16 cannot have a vocabulary of 97."""


def _graphs(recorder: Recorder | None = None, **options: Any) -> Graphs:
    options = {"warm_up": 0, "most_signatures": 8, "most_bytes": 1e9, **options}
    return Graphs(recorder or EmulatedGraphs(), CLASSES, torch.device("cpu"), **options)


def _backend(graphs: Graphs | None, *models: str, **trainer: Any) -> LoraBackend:
    """A backend with models whose lora_B is not zero, and with these graphs."""
    backend = make_backend(**{"gradient_checkpointing": False, **trainer})
    for name in models:
        backend.create_model(name, {**SPECS, **STACKED}[name])
        weights = rank_of(backend).adapters[name].weights
        weights.add_(torch.randn(weights.shape, generator=torch.Generator().manual_seed(7)), alpha=0.05)
    packed = rank_of(backend).base.packed
    packed.recomputation._measured_rows = 10**6  # what is measured runs without graphs
    assert graphs is None or packed.use_graphs(graphs)
    return backend


def _after(
    backend: LoraBackend, rounds: Sequence[Sequence[TrainingPass]], path: Path
) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    """Logprobs of passes in rounds, each with a step of each of its models, and the states of all models; the last
    round's gradients are pending."""
    logprobs: dict[str, Tensor] = {}
    for number, passes in enumerate(rounds):
        for index, result in enumerate(ok(backend.run(passes))):
            logprobs |= {f"{number}.{index}.{n}": torch.from_numpy(own) for n, own in enumerate(result.logprobs)}
        if number < len(rounds) - 1:
            for name in {each.model_id for each in passes}:
                backend.optim_step(name, STEP)
    return logprobs, [saved(backend, name, path / name) for name in rank_of(backend).adapters]


def test_passes_of_other_tenants_rows_and_ranks_are_those_without_graphs(tmp_path: Path) -> None:
    """Rows fill no class: products of other shapes may round in another way."""
    forward = TrainingPass("a", sft(5, 7), "cross_entropy", {}, backward=False)
    rounds = [
        [train("a", sft(1, 20)), train("b", sft(2, 40, 9)), train("attention", grpo(3, 2, 3, 20), "ppo")],
        [train("mlp", sft(4, 31)), train("ranks", rl(5, 70, 30), "ppo"), forward],
        [train("b", sft(6, 100)), train("a", sft(7, 50)), train("a", sft(8, 11)), train("mlp", sft(9, 63))],
        [train(name, sft(10, 37)) for name in SPECS],
    ]
    graphs = _graphs()
    found, states = _after(_backend(graphs, *SPECS), rounds, tmp_path / "graphs")
    expected, others = _after(_backend(None, *SPECS), rounds, tmp_path / "plain")
    for name, logprobs in expected.items():
        torch.testing.assert_close(found[name], logprobs, rtol=0, atol=2e-5)
    for one, other in zip(states, others, strict=True):
        assert_close(one, other, 2e-4)
    counts = graphs.counts
    assert counts.plain == 0
    assert counts.micro_batches == 15
    assert counts.replayed == 15 * PIECES - PIECES // 2 - 3, "one pass has no backward, three none of the first piece"


def test_passes_that_fill_their_class_have_the_same_bits(tmp_path: Path) -> None:
    rounds = [[train("a", sft(seed, rows)), train("b", sft(9, 33))] for seed, rows in enumerate((64, 136, 33))]
    graphs = _graphs()
    found, states = _after(_backend(graphs, "a", "b"), rounds, tmp_path / "graphs")
    expected, others = _after(_backend(None, "a", "b"), rounds, tmp_path / "plain")
    assert_same(found, expected)
    for one, other in zip(states, others, strict=True):
        assert_same(one, other)
    assert (graphs.counts.padded, graphs.counts.plain) == (0, 0)
    assert graphs.counts.replayed == 6 * PIECES


def test_merged_passes_are_those_without_graphs(tmp_path: Path) -> None:
    """As on a GPU: in bfloat16, with adapters in stacks."""
    rounds = [
        [train("c", sft(1, 20, 13)), train("d", sft(2, 40))],
        [train("d", sft(3, 9)), train("c", sft(4, 15))],
        [train("c", sft(5, 64))],
        [train("c", sft(6, 40)), train("d", sft(7, 24))],
    ]
    graphs = _graphs()
    with as_on_cuda():
        found, states = _after(_backend(graphs, *STACKED, merge=True), rounds, tmp_path / "graphs")
        expected, others = _after(_backend(None, *STACKED, merge=True), rounds, tmp_path / "plain")
    for name, logprobs in expected.items():
        assert float((found[name] - logprobs).norm()) <= 0.02 * float(logprobs.norm())
    for one, other in zip(states, others, strict=True):
        for name, tensor in other.items():
            assert float((one[name].float() - tensor.float()).norm()) <= 0.05 * float(tensor.float().norm()), name
    assert (graphs.counts.micro_batches, graphs.counts.plain) == (4, 0)
    assert graphs.counts.replayed == 4 * PIECES


def test_micro_batches_that_are_measured_or_recomputed_run_without_graphs(tmp_path: Path) -> None:
    passes = [train("a", sft(1, 64))]
    graphs = _graphs()
    backend, plain = _backend(graphs, "a", gradient_checkpointing="auto"), _backend(None, "a")
    recomputation = rank_of(backend).base.packed.recomputation
    recomputation._measured_rows = 0
    of_row = []
    for number in range(3):
        if number == 2:
            with recomputation.forced():
                ok(backend.run(passes))
        else:
            ok(backend.run(passes))
        of_row.append(recomputation.bytes_of_row)
        ok(plain.run(passes))
        assert graphs.counts.micro_batches == (0, 1, 1)[number]
    ok(backend.run(passes))
    ok(plain.run(passes))
    assert_same(saved(backend, "a", tmp_path / "one"), saved(plain, "a", tmp_path / "other"))
    assert graphs.counts.replayed == 2 * PIECES
    assert len(set(of_row)) == 1, "graphs change nothing that is measured"


class _Refusing(EmulatedGraphs):
    """Raises an error at one capture."""

    def __init__(self, error: Exception, at: int) -> None:
        super().__init__()
        self.error, self.left = error, at

    def capture(self, compute: Compute, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> Callable[[], None]:
        self.left -= 1
        if not self.left:
            raise self.error
        return super().capture(compute, reads, writes)


@pytest.mark.parametrize("error", [RuntimeError("not permitted"), torch.OutOfMemoryError("no memory")])
@pytest.mark.parametrize("at", [3, 7])
def test_a_capture_that_fails_leaves_the_pass_right(error: Exception, at: int, tmp_path: Path) -> None:
    rounds = [[train("a", sft(seed, 64))] for seed in range(3)]
    graphs = _graphs(_Refusing(error, at))
    found, states = _after(_backend(graphs, "a"), rounds, tmp_path / "graphs")
    expected, others = _after(_backend(None, "a"), rounds, tmp_path / "plain")
    assert_same(found, expected)
    assert_same(states[0], others[0])
    assert (graphs.counts.captured, graphs.counts.micro_batches, graphs.held_bytes) == (at - 1, 1, 0)


def test_without_memory_graphs_give_theirs_and_the_pass_runs_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    graphs = _graphs()
    backend, plain = _backend(graphs, "a", "b"), _backend(None, "a", "b")
    for each in (backend, plain):
        ok(each.run([train("a", sft(1, 64)), train("b", sft(1, 33))]))
    held, fill = graphs.held_bytes, pieces.fill

    def fails(*arguments: Any) -> None:
        monkeypatch.setattr(pieces, "fill", fill)
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(pieces, "fill", fails)
    ok(backend.run([train("a", sft(2, 64))]))
    assert 0 == graphs.held_bytes < held
    ok(plain.run([train("a", sft(2, 64))]))
    for each in (backend, plain):
        ok(each.run([train("b", sft(3, 33)), train("a", sft(4, 64))]))
    for name in "ab":
        assert_same(saved(backend, name, tmp_path / "one" / name), saved(plain, name, tmp_path / "other" / name))
    assert graphs.counts.replayed == 3 * PIECES, "two before, and one of a smaller class"


def test_memory_that_runs_out_without_graphs_is_the_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = _backend(_graphs(), "a")

    def fails(*arguments: Any) -> Any:
        raise torch.OutOfMemoryError("no memory")

    ok(backend.run([train("a", sft(1, 64))]))
    monkeypatch.setattr(rank_of(backend).base.packed, "_hidden_states", fails)
    (outcome,) = backend.run([train("a", sft(1, 64))])
    assert isinstance(outcome, OutOfMemory)


@pytest.mark.parametrize("architecture", ["qwen2-window", "llama"])
def test_plain_models_of_other_families_have_the_same_bits(architecture: str, tmp_path: Path) -> None:
    rounds = [[train("a", sft(seed, 64))] for seed in range(2)]
    graphs = _graphs()
    found, states = _after(_backend(graphs, "a", architecture=architecture), rounds, tmp_path / "graphs")
    expected, others = _after(_backend(None, "a", architecture=architecture), rounds, tmp_path / "plain")
    assert_same(found, expected)
    assert_same(states[0], others[0])
    assert graphs.counts.replayed == 2 * PIECES


def test_models_with_other_layers_have_no_graphs() -> None:
    packed = rank_of(make_backend("mixture-with-dense-layer")).base.packed
    assert not packed.use_graphs(_graphs())
    assert packed.layer_graphs is None


def test_a_cpu_has_no_graphs(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), pytest.raises(ConfigError) as raised:
        make_backend(cuda_graphs=True)
    assert str(raised.value) == "trainer.cuda_graphs: true needs a GPU, and the trainer computes on cpu"
