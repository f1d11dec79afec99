"""Sequences at which a loss has no gradient run without a backward; the numbers of a pass are those of one that runs
whole: logprobs within 2e-5, gradients within 1e-5 of the largest one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch_lora_support import files_saved, grpo, make_backend, make_full, ok, rl, saved, sft, spec, train

from skyrl.base.types.weights import LoraSpec
from skyrl.trainer.losses import LOSSES
from skyrl.trainer.passes import pass_run
from skyrl.trainer.protocol import AdamParams, Backend, Datum, OutOfMemory, TrainingPass
from skyrl.trainer.rows import prefixes
from skyrl.trainer.rows.prefixes import PrefixTree, prefix_tree
from tests.local_ranks import rank_of

CPU = torch.device("cpu")
SEQUENCES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=8)
ADAM = AdamParams(learning_rate=1e-2)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Sequences run apart as soon as that saves a row."""
    monkeypatch.setattr(pass_run, "SAVED_ON_CPU", 1)
    return monkeypatch


def _work(tree: PrefixTree, without: Sequence[int]) -> float:
    with_backward = sorted({*range(len(tree.ends))} - {*without})
    return 2 * tree.rows(with_backward) + tree.rows(without)


@given(SEQUENCES, st.data())
def test_the_choice_makes_the_least_work(sequences: list[list[int]], data: st.DataObject) -> None:
    trained = data.draw(st.lists(st.booleans(), min_size=len(sequences), max_size=len(sequences)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefixes, "MIN_SAVED_ROWS", 1)
        patch.setattr(pass_run, "SAVED_ON_CPU", 0)
        tree = prefix_tree([Datum(np.array(tokens), {}) for tokens in sequences])
        with_backward, without = pass_run.divided(tree, trained, "cpu")
    assert sorted([*with_backward, *without]) == [*range(len(sequences))]
    assert not any(trained[index] for index in without)
    free = [index for index, each in enumerate(trained) if not each]
    choices = product((True, False), repeat=len(free))
    least = min(_work(tree, [index for index, apart in zip(free, each, strict=True) if apart]) for each in choices)
    assert _work(tree, without) == least


def test_few_rows_stay_together() -> None:
    data = sft(0, *[7] * 10)
    tree = prefix_tree(data)
    assert pass_run.divided(tree, [True] + [False] * 9, "cpu") == (range(10), [])  # 63 rows
    assert pass_run.divided(tree, [False] * 10, "cpu") == ([], [*range(10)])  # 70
    assert pass_run.divided(tree, [False] * 10, "cuda") == (range(10), [])


@pytest.mark.parametrize(
    ("loss", "inputs", "expected"),
    [
        ("cross_entropy", {}, True),
        ("cross_entropy", {"weights": [0, 0]}, False),
        ("cross_entropy", {"weights": [0, -1]}, True),
        ("importance_sampling", {"advantages": [0, 0]}, False),
        ("gspo", {"advantages": [0, 0.5]}, True),
        ("dro", {"advantages": [0, 0]}, True),
    ],
)
def test_which_sequences_have_no_gradient(loss: str, inputs: dict[str, list[float]], expected: bool) -> None:
    arrays = {name: np.array(values, np.float32) for name, values in inputs.items()}
    datum = Datum(np.array([1, 2]), {"target_tokens": np.array([2, 3]), **arrays})
    assert pass_run.is_trained(datum, LOSSES[loss]) is expected


def _without_advantage(data: Sequence[Datum], groups: set[int]) -> list[Datum]:
    """The samples of some of the prompts, of 30 tokens, get no advantage."""
    numbers: dict[bytes, int] = {}

    def kept(datum: Datum) -> Datum:
        if numbers.setdefault(datum.tokens[:30].tobytes(), len(numbers)) not in groups:
            return datum
        return replace(datum, loss_inputs={**datum.loss_inputs, "advantages": 0 * datum.loss_inputs["advantages"]})

    return [kept(datum) for datum in data]


def _for_loss(loss: str, data: Sequence[Datum]) -> list[Datum]:
    """RL data with the inputs of a loss alone: advantages are weights, sampled tokens those of GSPO's mean."""

    def inputs(datum: Datum) -> dict[str, Any]:
        given = datum.loss_inputs
        if loss == "cross_entropy":
            return {"target_tokens": given["target_tokens"], "weights": given["advantages"]}
        if loss == "gspo":
            return {**given, "sequence_ratio_mask": (given["logprobs"] != 0).astype(np.float32)}
        return dict(given)

    return [replace(datum, loss_inputs=inputs(datum)) for datum in data]


def _made(full: bool) -> tuple[Backend, LoraSpec]:
    if full:
        return make_full(micro_batch_tokens=128), LoraSpec(rank=0, alpha=32.0, seed=0)
    return make_backend(micro_batch_tokens=128), spec()


def _tensors(backend: Backend, full: bool, path: Path) -> dict[str, torch.Tensor]:
    return files_saved(backend, "m", path) if full else saved(backend, "m", path)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("loss", "full"),
    [("importance_sampling", False), ("importance_sampling", True), ("gspo", False), ("cross_entropy", False)],
)
def test_a_pass_has_the_numbers_of_one_that_runs_whole(
    loss: str, full: bool, at_once: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    data = _for_loss(loss, _without_advantage(grpo(1, 6, 4, 30), {0, 2, 3}))
    found = []
    for name, least in (("apart", 1), ("whole", 10**9)):
        at_once.setattr(pass_run, "SAVED_ON_CPU", least)
        backend, of_model = _made(full)
        backend.create_model("m", of_model)
        ok(backend.run([train("m", sft(0, 20))]))
        backend.optim_step("m", ADAM)  # lora_B is not 0
        (result,) = ok(backend.run([TrainingPass("m", data, loss)]))
        found.append((result, _tensors(backend, full, tmp_path / name)))
    (apart, tensors), (whole, others) = found
    for one, other in zip(apart.logprobs, whole.logprobs, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)
    assert apart.metrics.keys() == whole.metrics.keys()
    for name in apart.metrics.keys() - {"computed_tokens:sum"}:
        assert apart.metrics[name] == pytest.approx(whole.metrics[name], rel=1e-5, abs=1e-6), name
    gradients = [name for name in others if name.startswith("gradient")]
    largest = max(float(others[name].abs().max()) for name in gradients)
    assert largest > 0
    for name in gradients:
        assert float((tensors[name] - others[name]).abs().max()) < 1e-5 * largest, name


@pytest.mark.parametrize("merge", [False, True])
def test_rows_of_groups_without_advantage_have_no_graph(merge: bool, at_once: pytest.MonkeyPatch) -> None:
    ran: list[tuple[int, bool]] = []
    backend = make_backend(merge=merge)
    backend.create_model("m", spec())
    inner: Any = rank_of(backend).base.packed.forward

    def seen(packed: Any, *arguments: Any) -> Any:
        ran.append((sum(each.stop - each.start for each in packed), torch.is_grad_enabled()))
        return inner(packed, *arguments)

    at_once.setattr(rank_of(backend).base.packed, "forward", seen)
    data = _without_advantage(grpo(1, 6, 4, 30), {0, 2, 3})
    ok(backend.run([train("m", data, "importance_sampling")]))
    tree = prefix_tree(data)
    trained = [bool(datum.loss_inputs["advantages"].any()) for datum in data]
    of_kind = [tree.rows([index for index, each in enumerate(trained) if each is wanted]) for wanted in (True, False)]
    assert ran == [(of_kind[1], False), (of_kind[0], True)]


@pytest.mark.parametrize("full", [False, True])
def test_a_pass_without_any_gradient_is_one_of_zeros(full: bool, at_once: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The step after it moves the weights by the moments alone, as after a pass that runs whole."""
    found = []
    for name, least in (("apart", 1), ("whole", 10**9)):
        at_once.setattr(pass_run, "SAVED_ON_CPU", least)
        backend, of_model = _made(full)
        backend.create_model("m", of_model)
        ok(backend.run([train("m", sft(0, 20, 30))]))
        backend.optim_step("m", ADAM)
        nothing = _without_advantage(grpo(1, 2, 4, 30), {0, 1})
        ok(backend.run([train("m", nothing, "importance_sampling")]))
        metrics = backend.optim_step("m", ADAM)
        assert metrics["grad_norm"] == 0
        found.append(_tensors(backend, full, tmp_path / name))
    apart, whole = found
    assert apart.keys() == whole.keys()
    assert all(torch.equal(apart[name], whole[name]) for name in whole)


def test_a_loss_that_is_not_finite_fails_its_pass_alone(at_once: pytest.MonkeyPatch) -> None:
    backend = make_backend()
    for model_id in "ab":
        backend.create_model(model_id, spec())
    good = train("a", _without_advantage(grpo(1, 3, 4, 30), {0}), "importance_sampling")
    first, *rest = rl(0, 20, 30)
    broken = {**first.loss_inputs, "logprobs": np.full(20, -1000, np.float32)}
    bad = train("b", [replace(first, loss_inputs=broken), *_without_advantage(rest, {0})], "importance_sampling")
    outcomes = backend.run([good, bad])
    assert "is inf" in str(outcomes[1]) or "is -inf" in str(outcomes[1])
    assert len(ok([outcomes[0]])[0].logprobs) == 12
    assert backend.optim_step("b", ADAM) == {}


@pytest.mark.parametrize("full", [False, True])
def test_memory_that_runs_out_without_a_backward_says_nothing_of_what_rows_keep(
    full: bool, at_once: pytest.MonkeyPatch
) -> None:
    """No layer is recomputed for it, neither in a second attempt nor in later micro-batches."""
    backend, of_model = _made(full)
    backend.create_model("m", of_model)
    packed: Any = rank_of(backend).base.packed  # type: ignore[attr-defined]
    before, calls = packed.recomputation.bytes_of_row, list[bool]()

    def without_memory(*_: Any) -> Any:
        calls.append(torch.is_grad_enabled())
        raise torch.OutOfMemoryError("no memory")

    at_once.setattr(packed, "forward", without_memory)
    nothing = _without_advantage(grpo(1, 2, 4, 30), {0, 1})
    (outcome,) = backend.run([train("m", nothing, "importance_sampling")])
    assert isinstance(outcome, OutOfMemory)
    assert calls == [False]
    assert packed.recomputation.bytes_of_row == before
