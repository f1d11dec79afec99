"""Work that is saved changes no number: rows that sequences have in common run once, sequences without a gradient run
without a backward. Logprobs are within 5e-5, all else within 5e-5 of a tensor's largest number."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch_lora_support import VOCAB, assert_close, cut, files_saved, grpo, ok, rl, sft, train
from trainer_kinds import FULL, LORA, STEP, Kind

from skyrl.trainer.losses import LOSSES
from skyrl.trainer.passes import pass_run
from skyrl.trainer.protocol import Datum, OutOfMemory, TrainingPass
from skyrl.trainer.rows import prefixes
from skyrl.trainer.rows.prefixes import PrefixTree, prefix_tree
from tests.local_ranks import rank_of

SEQUENCES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=8)


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


def _mixed_weights() -> list[Datum]:
    """Supervised data on common prompts. Weights at the prompts differ between sequences, and some are 0."""
    rng = np.random.default_rng(5)
    data = []
    for datum in grpo(5, 2, 4, 30):
        weights = rng.choice([0.0, 1.0, -0.5], len(datum.tokens)).astype(np.float32)
        data.append(Datum(datum.tokens, {"target_tokens": datum.loss_inputs["target_tokens"], "weights": weights}))
    return data


def _wide_targets() -> list[Datum]:
    """[N, K] targets; at a common row sequences have some targets in common, and some of their own."""
    rng = np.random.default_rng(6)
    data = []
    for number, datum in enumerate(grpo(6, 2, 3, 25)):
        first = datum.loss_inputs["target_tokens"]
        targets = np.stack([first, *rng.integers(0, VOCAB, (1 + number % 2, len(first)))], axis=1)
        weights = rng.normal(size=targets.shape).astype(np.float32)
        inputs: dict[str, Any] = {"target_tokens": targets, "weights": weights}
        data.append(Datum(datum.tokens, inputs))
    return data


def _turns() -> list[Datum]:
    """Conversations: each datum continues the one before, and two branches leave in the middle."""
    (whole,) = rl(7, 90)
    branches = [cut(rl(8, 90)[0], 90), cut(rl(9, 80)[0], 80)]
    for branch in branches:
        branch.tokens[:50] = whole.tokens[:50]
    return [cut(whole, 20), cut(whole, 90), *branches, cut(whole, 45), cut(whole, 70)]


def _partly_without_advantage(loss: str = "importance_sampling", groups: Sequence[int] = (0, 2, 3)) -> list[Datum]:
    """Samples of six prompts; those of some prompts have no advantage, or for cross_entropy no weight."""
    numbers: dict[bytes, int] = {}
    made = []
    for datum in grpo(1, 6, 4, 30):
        given: dict[str, Any] = dict(datum.loss_inputs)
        if numbers.setdefault(datum.tokens[:30].tobytes(), len(numbers)) in groups:
            given["advantages"] = 0 * given["advantages"]
        if loss == "cross_entropy":
            given = {"target_tokens": given["target_tokens"], "weights": given["advantages"]}
        elif loss == "gspo":
            given["sequence_ratio_mask"] = (given["logprobs"] != 0).astype(np.float32)
        made.append(replace(datum, loss_inputs=given))
    return made


SHARED, APART = (prefixes, "MIN_SAVED_ROWS", 16), (pass_run, "SAVED_ON_CPU", 1)
"""Where what is saved is set; and a value with which something is saved."""
DATA: dict[str, tuple[Callable[[], list[Datum]], str, Any]] = {
    "groups": (lambda: grpo(1, 3, 4, 30), "importance_sampling", SHARED),
    "clipped": (lambda: grpo(1, 3, 4, 30), "ppo", SHARED),
    "all positions": (lambda: grpo(2, 2, 3, 30), "dro", SHARED),
    "turns": (_turns, "importance_sampling", SHARED),
    "twice the same": (lambda: [*rl(3, 40, 12), *rl(3, 40, 12)], "importance_sampling", SHARED),
    "mixed weights": (_mixed_weights, "cross_entropy", SHARED),
    "several targets": (_wide_targets, "cross_entropy", SHARED),
    "partly without advantage": (_partly_without_advantage, "importance_sampling", APART),
    "partly without advantage in gspo": (lambda: _partly_without_advantage("gspo"), "gspo", APART),
    "partly without weight": (lambda: _partly_without_advantage("cross_entropy"), "cross_entropy", APART),
    "without advantage": (lambda: _partly_without_advantage(groups=range(6)), "importance_sampling", APART),
}


@pytest.mark.parametrize(
    ("kind", "architecture", "name"),
    [
        *((LORA, "qwen3", name) for name in DATA),
        *((LORA, "qwen2-window", name) for name in ("groups", "turns")),
        *((FULL, "qwen3", name) for name in ("groups", "partly without advantage", "without advantage")),
    ],
    ids=str,
)
def test_work_that_is_saved_changes_no_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind, architecture: str, name: str
) -> None:
    """Of a step before, a step, and a gradient that waits."""
    data, (make, loss, (module, setting, least)) = [], DATA[name]
    for number, value in enumerate((least, 10**9)):
        monkeypatch.setattr(module, setting, value)
        backend = kind.backend(architecture=architecture, micro_batch_tokens=128)
        backend.create_model("m", kind.model)
        ok(backend.run([train("m", sft(0, 20))]))
        backend.optim_step("m", STEP)  # so that lora_B is not 0
        results = ok(backend.run([train("m", make(), loss)]))
        norm = backend.optim_step("m", STEP)["grad_norm"]
        assert (norm == 0) == (name == "without advantage")
        results += ok(backend.run([TrainingPass("m", make(), loss, backward=False), train("m", make(), loss)]))
        data.append((results, files_saved(backend, "m", tmp_path / str(number))))
    (saving, state), (whole, of_whole) = data
    for one, other in zip(saving, whole, strict=True):
        rows = {"computed_tokens:sum": one.metrics["computed_tokens:sum"]}
        assert one.metrics == pytest.approx(other.metrics | rows, rel=1e-4, abs=1e-4)
        if module is prefixes:
            assert other.metrics["computed_tokens:sum"] == other.metrics["num_tokens:sum"]
            assert one.metrics["computed_tokens:sum"] < 0.7 * one.metrics["num_tokens:sum"]
        for logprobs, expected in zip(one.logprobs, other.logprobs, strict=True):
            np.testing.assert_allclose(logprobs, expected, atol=5e-5)
    assert_close(state, of_whole, 5e-5)


@pytest.mark.parametrize(("kind", "merge"), [(LORA, False), (LORA, True), (FULL, False)], ids=str)
def test_rows_of_groups_without_advantage_have_no_graph(
    kind: Kind, merge: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pass_run, "SAVED_ON_CPU", 1)
    ran: list[tuple[int, bool]] = []
    backend = kind.backend(micro_batch_tokens=4096, merge_passes=merge)
    backend.create_model("m", kind.model)
    inner: Any = rank_of(backend).base.packed.forward

    def seen(packed: Any, *arguments: Any) -> Any:
        ran.append((sum(each.stop - each.start for each in packed), torch.is_grad_enabled()))
        return inner(packed, *arguments)

    monkeypatch.setattr(rank_of(backend).base.packed, "forward", seen)
    data = _partly_without_advantage()
    ok(backend.run([train("m", data, "importance_sampling")]))
    tree = prefix_tree(data)
    trained = [bool(datum.loss_inputs["advantages"].any()) for datum in data]
    of_kind = [tree.rows([index for index, each in enumerate(trained) if each is wanted]) for wanted in (True, False)]
    assert ran == [(of_kind[1], False), (of_kind[0], True)]


@pytest.mark.parametrize("kind", [LORA, FULL], ids=str)
def test_memory_that_runs_out_without_a_backward_says_nothing_of_what_rows_keep(
    kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No layer is recomputed for it, neither in a second attempt nor in later micro-batches."""
    monkeypatch.setattr(pass_run, "SAVED_ON_CPU", 1)
    backend = kind.backend(micro_batch_tokens=128)
    backend.create_model("m", kind.model)
    packed: Any = rank_of(backend).base.packed
    before, calls = packed.recomputation.bytes_of_row, list[bool]()

    def without_memory(*_: Any) -> Any:
        calls.append(torch.is_grad_enabled())
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(packed, "forward", without_memory)
    nothing = _partly_without_advantage(groups=range(6))
    (outcome,) = backend.run([train("m", nothing, "importance_sampling")])
    assert isinstance(outcome, OutOfMemory)
    assert calls == [False]
    assert packed.recomputation.bytes_of_row == before
