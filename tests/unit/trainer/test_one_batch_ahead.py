"""A rank alone starts a micro-batch before it reads the one before it: the order, how often the host waits, what is
held meanwhile, and what a pass that fails leaves."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch_lora_support import VOCAB, assert_same, grpo, make_backend, make_full, ok, saved, sft, spec, train

from benchmarks.operations import as_on_cuda, counting
from skyrl.trainer import device
from skyrl.trainer.device import moved
from skyrl.trainer.model import layer_functions
from skyrl.trainer.passes.scores import SentScores
from skyrl.trainer.protocol import AdamParams, Datum, InvalidRequest, OutOfMemory, TrainingPass
from skyrl.trainer.ranks.lora_backend import LoraBackend
from tests.local_ranks import rank_of

LENGTHS = (20, 21, 22, 23)
"""With a budget of 24 rows each sequence is a micro-batch."""


def _backend(*, merge: bool = False, budget: int = 24, **trainer: Any) -> LoraBackend:
    backend = make_backend(merge=merge, micro_batch_tokens=budget, **trainer)
    for seed, model_id in enumerate("ab"):
        backend.create_model(model_id, spec(2, seed))
    return backend


def _noted(backend: Any, patch: pytest.MonkeyPatch, note: Callable[[str], None]) -> None:
    """`note` gets "start" before each forward, and "read" before each reading of results."""
    packed: Any = rank_of(backend).base.packed
    forward, read = packed.forward, SentScores.read

    def start(*arguments: Any) -> Any:
        note("start")
        return forward(*arguments)

    def noted_read(scores: SentScores) -> Any:
        note("read")
        return read(scores)

    patch.setattr(packed, "forward", start)
    patch.setattr(SentScores, "read", noted_read)


def _spoilt(data: list[Datum]) -> list[Datum]:
    """The loss of the first sequence is infinite."""
    data[0].loss_inputs["weights"][:] = np.finfo(np.float32).max
    return data


@pytest.mark.parametrize("make", [_backend, make_full], ids=["adapters", "whole model"])
def test_the_next_micro_batch_is_started_before_one_is_read(
    make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, notes = make(), list[str]()
    if make is make_full:
        backend.create_model("a", spec(0))
        rank_of(backend)._rows = 24
    _noted(backend, monkeypatch, notes.append)
    ok(backend.run([train("a", sft(1, *[40] * 3))]))
    assert notes == ["start", "start", "read", "start", "read", "read"]


@pytest.mark.parametrize("lengths", [LENGTHS[:1], LENGTHS], ids=["one", "four"])
@pytest.mark.parametrize("merge", [False, True], ids=["alone", "merged"])
def test_the_host_waits_once_in_a_pass_whatever_its_micro_batches_and_once_in_a_step(
    lengths: tuple[int, ...], merge: bool
) -> None:
    """It waits for the others while the device has a later one. `counting` counts as on CUDA. Beside that each command
    ends with the device: an error of a kernel is its own."""
    with as_on_cuda():
        backend = _backend(merge=merge)
        ok(backend.run([train("a", sft(0, 20))]))
        with counting() as operations:
            ok(backend.run([train("a", sft(1, *lengths))]))
        assert operations.waits.total() == 2
        assert operations.behind.total() == len(lengths) - 1
        assert operations.uploads.total() <= 4 * len(lengths)
        with counting() as operations:
            backend.optim_step("a", AdamParams())
        assert (operations.waits.total(), operations.uploads.total()) == (2, 0)


def test_what_waits_to_be_read_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor of the graph is left, and nothing as large as a layer's rows or logits."""
    backend, larger = _backend(), list[list[tuple[int, ...]]]()
    gc.collect()
    known = {id(each) for each in gc.get_objects() if isinstance(each, Tensor)}
    kept: list[Any] = []

    def look(event: str) -> None:
        found = [each for each in gc.get_objects() if isinstance(each, Tensor) and id(each) not in known]
        if event == "read":
            kept.append(found)
            assert all(each.grad_fn is None for each in found)
            adapter = rank_of(backend).adapters["a"].weights.numel()
            larger.append([tuple(each.shape) for each in found if each.numel() > 100 and each.numel() != adapter])

    _noted(backend, monkeypatch, look)
    ok(backend.run([train("a", sft(1, *LENGTHS))]))
    assert kept[0], "what waits is seen"
    assert larger == [[]] * len(LENGTHS), "hidden states have 48 numbers a row, logits 97"


@dataclass
class _After:
    outcomes: list[Any]
    states: list[dict[str, Tensor]]


def _after(passes: list[TrainingPass], path: Path, *, merge: bool = False, **trainer: Any) -> _After:
    backend = _backend(merge=merge, **trainer)
    for model_id in "ab":
        ok(backend.run([train(model_id, sft(7, 20))]))
    outcomes = backend.run(passes)
    return _After(outcomes, [saved(backend, model_id, path / model_id) for model_id in "ab"])


def test_a_pass_that_fails_has_one_micro_batch_more_which_adds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = train("b", sft(2, *LENGTHS))
    expected = _after([good], tmp_path / "expected")
    found = _after([train("a", _spoilt(sft(1, *LENGTHS))), good], tmp_path / "found")
    failed, result = found.outcomes
    assert isinstance(failed, InvalidRequest)
    assert result.metrics == expected.outcomes[0].metrics
    for one, other in zip(found.states, expected.states, strict=True):
        assert_same(one, other)
    backend, notes = _backend(), list[str]()
    _noted(backend, monkeypatch, notes.append)
    backend.run([train("a", _spoilt(sft(1, *LENGTHS)))])
    assert notes == ["start", "start", "read", "read"]


def test_a_micro_batch_that_cannot_be_started_fails_after_the_one_before_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pass before it keeps its gradient, and the pass after it runs."""
    passes = [train("a", sft(1, 20)), train("b", sft(2, 21, 22)), train("a", sft(3, 23))]
    expected = _after([passes[0], passes[2]], tmp_path / "expected")
    short = layer_functions.products

    def lacks(x: Tensor, *arguments: Any) -> Any:
        if len(x) == 22:
            raise torch.OutOfMemoryError("no memory left")
        return short(x, *arguments)

    monkeypatch.setattr(layer_functions, "products", lacks)
    found = _after(passes, tmp_path / "found")
    one, failed, other = found.outcomes
    assert isinstance(failed, OutOfMemory)
    assert [one.metrics, other.metrics] == [each.metrics for each in expected.outcomes]
    for state, of_expected in zip(found.states, expected.states, strict=True):
        assert_same(state, of_expected)


def test_a_pass_keeps_the_error_of_its_loss_when_its_next_micro_batch_cannot_be_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = layer_functions.products

    def lacks(x: Tensor, *arguments: Any) -> Any:
        if len(x) == 22:
            raise torch.OutOfMemoryError("no memory left")
        return short(x, *arguments)

    data = _spoilt(sft(1, 20, 22))
    assert len(data[1].tokens) == 22, "its second micro-batch cannot be started"
    monkeypatch.setattr(layer_functions, "products", lacks)
    (failed,) = _after([train("a", data)], tmp_path, gradient_checkpointing=False).outcomes
    assert isinstance(failed, InvalidRequest)


def test_a_micro_batch_without_memory_runs_once_more_when_the_one_before_has_been_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That one holds the complete gradient of its pass until then."""
    passes = [train("a", sft(1, 20)), train("b", sft(2, 22))]
    expected = _after(passes, tmp_path / "expected")
    short, tried = layer_functions.products, list[int]()

    def lacks(x: Tensor, *arguments: Any) -> Any:
        if len(x) == 22:
            tried.append(22)
            if len(tried) == 1:
                raise torch.OutOfMemoryError("no memory left")
        return short(x, *arguments)

    monkeypatch.setattr(layer_functions, "products", lacks)
    found = _after(passes, tmp_path / "found", gradient_checkpointing=False)
    assert len(tried) > 1
    for one, other in zip(found.states, expected.states, strict=True):
        assert_same(one, other)
    assert [each.metrics for each in ok(found.outcomes)] == [each.metrics for each in expected.outcomes]


def test_a_lack_of_memory_where_results_are_read_fails_the_passes_of_that_micro_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = _after([train("b", sft(2, 20))], tmp_path / "expected")
    read = SentScores.read

    def lacks(scores: SentScores) -> Any:
        if any(part.data[0].tokens.size == 22 for each in scores.sums for part in each.group.parts):
            raise MemoryError
        return read(scores)

    monkeypatch.setattr(SentScores, "read", lacks)
    found = _after([train("a", sft(1, *LENGTHS)), train("b", sft(2, 20))], tmp_path / "found")
    assert isinstance(found.outcomes[0], OutOfMemory)
    assert found.outcomes[1].metrics == expected.outcomes[0].metrics
    for one, other in zip(found.states, expected.states, strict=True):
        assert_same(one, other)


def test_steps_of_other_models_between_two_micro_batches_change_no_bit(tmp_path: Path) -> None:
    """They run while a micro-batch waits to be read."""
    states: list[list[dict[str, Tensor]]] = []
    for interrupts in (False, True):
        backend, ran = _backend(), list[str]()

        def step(backend: LoraBackend = backend, ran: list[str] = ran) -> None:
            if not ran:
                ran.append("b")
                ok(backend.run([train("b", grpo(1, 2, 3, 12), "ppo")]))
                backend.optim_step("b", AdamParams(learning_rate=1e-2))

        if interrupts:
            backend.yield_to(step)
        ok(backend.run([train("a", sft(1, *LENGTHS))]))
        step()
        states.append([saved(backend, model_id, tmp_path / str(interrupts) / model_id) for model_id in "ab"])
    for one, other in zip(*states, strict=True):
        assert_same(one, other)


@dataclass(frozen=True)
class _Inner:
    numbers: Tensor
    name: str


@dataclass(frozen=True)
class _Outer:
    rows: Tensor
    inner: _Inner
    layers: tuple[Tensor, ...]
    nothing: Tensor | None = None


def test_tensors_and_those_in_dataclasses_keep_shape_dtype_and_numbers_in_one_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device, "has_own_memory", lambda each: True)
    generator = torch.Generator().manual_seed(0)
    layers = tuple(torch.randn(3, 5, generator=generator).to(torch.bfloat16) for _ in range(2))
    thing = _Outer(torch.arange(VOCAB), _Inner(torch.tensor([True, False, True]), "n"), layers)
    more = [torch.zeros(0, 4), torch.arange(12, dtype=torch.int32).view(3, 4).t()]
    found, *others = moved([thing, *more], torch.device("cpu"))
    assert isinstance(found, _Outer)
    assert found.inner.name == "n"
    assert found.nothing is None
    pairs = [(found.rows, thing.rows), (found.inner.numbers, thing.inner.numbers)]
    for one, other in [*pairs, *zip(found.layers, layers, strict=True), *zip(others, more, strict=True)]:
        assert isinstance(one, Tensor)
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
        assert one.untyped_storage().data_ptr() == found.rows.untyped_storage().data_ptr()
