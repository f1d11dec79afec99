"""How passes are cut and divided over ranks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch_lora_support import grpo, sft, train

from skyrl.trainer.losses import served_losses
from skyrl.trainer.protocol import OutOfMemory, TrainingPass
from skyrl.trainer.ranks import plan as plan_module
from skyrl.trainer.ranks.plan import Plan, RankShare, cut_evenly, make_plan, plan_alone
from skyrl.trainer.rows.prefixes import prefix_tree

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=30)
RANKS = st.integers(1, 5)
BUDGET = 64


def _of_rank(plan: Plan, rank: int) -> list[tuple[RankShare, ...]]:
    """The micro-batches of a rank."""
    return [batches[rank] for batches in plan.rounds()]


def _plan(passes: list[TrainingPass], ranks: int, *, merge: bool = False) -> Plan:
    return make_plan(list(enumerate(passes)), ranks, BUDGET, shared_rows=BUDGET if merge else 0)


@given(st.lists(LENGTHS, min_size=1, max_size=5), RANKS, st.booleans())
def test_every_sequence_is_in_one_piece_and_micro_batches_keep_the_budget(
    lengths: list[list[int]], ranks: int, merge: bool
) -> None:
    plan = _plan([train(f"m{number}", sft(number, *each)) for number, each in enumerate(lengths)], ranks, merge=merge)
    for number, each in enumerate(lengths):
        pieces = [piece for _, piece in plan.pieces_of(number)]
        assert sorted(index for piece in pieces for index in piece.data) == list(range(len(each)))
        assert all(piece.rows == sum(each[index] for index in piece.data) for piece in pieces)
        assert all(list(piece.data) == sorted(piece.data) for piece in pieces)
    for rank in range(ranks):
        for batch in _of_rank(plan, rank):
            assert merge or len(batch) <= 1
            sequences = sum(len(piece.data) for piece in batch)
            assert sum(piece.rows for piece in batch) <= BUDGET or sequences == 1


@given(st.lists(LENGTHS, min_size=1, max_size=4), RANKS)
def test_passes_are_completed_in_order_and_after_their_last_piece(lengths: list[list[int]], ranks: int) -> None:
    plan = _plan([train("m", sft(number, *each)) for number, each in enumerate(lengths)], ranks)
    completed = plan.completed()
    assert [number for numbers in completed for number in numbers] == list(range(len(lengths)))
    for index, numbers in enumerate(completed):
        left = {piece.number for rank in range(ranks) for batch in _of_rank(plan, rank)[index + 1 :] for piece in batch}
        assert not left & set(numbers)


def _completed_alone(passes: list[TrainingPass], *, merge: bool) -> list[list[int]]:
    """On a rank without others, with one piece in each micro-batch."""
    losses = served_losses("refuse")
    return plan_alone(list(enumerate(passes)), BUDGET, losses, "cpu", merge=merge, shared_rows=1).completed()


def test_alone_a_pass_that_trains_nothing_waits_for_no_earlier_one() -> None:
    """Its gradient, which is zero, would wait beside those of the models."""
    untrained = sft(1, 400)  # of fewer rows a backward is run all the same
    untrained[0].loss_inputs["weights"][:] = 0
    passes = [train("a", sft(0, 20)), train("a", untrained), train("b", untrained), train("a", sft(2, 20))]
    assert _completed_alone(passes, merge=False) == [[1], [2], [0], [3]]


def test_alone_a_pass_waits_for_earlier_ones_of_its_model_only() -> None:
    """Passes that may run as one come model by model."""
    passes = [train(model_id, sft(seed, 20)) for seed, model_id in enumerate(("a", "b", "a", "b"))]
    assert _completed_alone(passes, merge=True) == [[0], [2], [1], [3]]


@given(LENGTHS, st.lists(LENGTHS, max_size=3), RANKS)
def test_other_passes_do_not_change_where_a_pass_runs(lengths: list[int], others: list[list[int]], ranks: int) -> None:
    own = train("m", sft(1, *lengths))
    alone = _plan([own], ranks)
    before = [train("other", sft(number, *each)) for number, each in enumerate(others)]
    beside = _plan([*before, own, *before], ranks)
    assert [(rank, piece.data) for rank, piece in alone.pieces_of(0)] == [
        (rank, piece.data) for rank, piece in beside.pieces_of(len(before))
    ]


@given(LENGTHS, RANKS)
def test_the_same_data_of_another_model_run_on_the_same_ranks(lengths: list[int], ranks: int) -> None:
    """A training script that runs again has a new model, and expects the same bits."""
    one, other = (_plan([train(model_id, sft(1, *lengths))], ranks) for model_id in ("m", "another"))
    assert one.pieces_of(0) == other.pieces_of(0)


def test_a_pass_is_cut_finer_than_the_budget_so_that_all_ranks_work() -> None:
    (parts,) = cut_evenly(prefix_tree(sft(0, *[5] * 12)), 4, 4096)
    assert [len(part) for part in parts] == [3, 3, 3, 3]
    (parts,) = cut_evenly(prefix_tree(sft(0, 40, 10, 10, 10, 10)), 2, 4096)
    assert [sum(([40, 10, 10, 10, 10])[index] for index in part) for part in parts] == [40, 40]


def test_small_passes_spread_over_the_ranks() -> None:
    plan = _plan([train(f"tenant-{number}", sft(number, 9)) for number in range(64)], 4)
    counts = [sum(bool(batch) for batch in _of_rank(plan, rank)) for rank in range(4)]
    assert min(counts) >= 8
    merged = _plan([train("m", sft(number, 9)) for number in range(64)], 4, merge=True)
    assert {sum(piece.rows for batch in _of_rank(merged, rank) for piece in batch) for rank in range(4)} == {16 * 9}
    assert np.ptp([len(_of_rank(merged, rank)) for rank in range(4)]) == 0


def test_merged_passes_share_micro_batches_up_to_a_limit_below_the_budget() -> None:
    passes = list(enumerate(train("m", sft(number, *each)) for number, each in enumerate([[12], [12], [12], [30, 20]])))
    (batches,) = make_plan(passes, 1, BUDGET, shared_rows=24).batches
    assert [[piece.rows for piece in batch] for batch in batches] == [[12, 12], [12], [50]]


@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.parametrize("step", ["divide", "_first_rank"])
def test_no_memory_to_cut_a_pass_fails_that_pass_alone(monkeypatch: pytest.MonkeyPatch, merge: bool, step: str) -> None:
    passes = [train("a", sft(1, 9)), train("b", sft(2, 8, 30)), train("c", sft(3, 7))]
    expected = _plan([passes[0], passes[2]], 1, merge=merge)
    original = getattr(plan_module, step)

    def short(of: object, *rest: int) -> object:
        if of is passes[1] or of is passes[1].data:
            raise MemoryError("no memory left")
        return original(of, *rest)

    monkeypatch.setattr(plan_module, step, short)
    plan = _plan(passes, 1, merge=merge)
    assert isinstance(plan.failed[1], OutOfMemory)
    assert [len(piece.data) for number in (0, 1, 2) for _, piece in plan.pieces_of(number)] == [1, 1]
    assert plan.count == expected.count


@pytest.mark.parametrize("ranks", [2, 4])
def test_long_prompts_are_shared_where_a_group_has_more_rows_than_the_budget(ranks: int) -> None:
    tree = prefix_tree(grpo(0, 4, 16, 200, answer=30))
    parts = [part for parts in cut_evenly(tree, ranks, 400) for part in parts]
    alone = sum(map(tree.rows, tree.cut(400)))
    assert sum(map(tree.rows, parts)) <= 1.1 * alone
    assert alone < 0.4 * sum(tree.rows([index]) for index in range(64))


def test_samples_of_a_prompt_stay_on_one_rank_where_the_balance_allows_it() -> None:
    data = grpo(0, 4, 6, 40, answer=5)
    tree = prefix_tree(data)
    assert sorted(map(len, tree.families)) == [6] * 4
    (parts,) = cut_evenly(tree, 2, 4096)
    assert sum(tree.rows(part) for part in parts) == tree.rows(range(len(data))), "no prompt is on two ranks"
    one_group = prefix_tree(grpo(0, 1, 6, 40, answer=5))
    (parts,) = cut_evenly(one_group, 2, 4096)
    assert [len(part) for part in parts] == [3, 3], "the only group is cut, so that both ranks work"


@given(st.integers(1, 4), st.integers(1, 6), RANKS)
def test_rows_are_counted_once_for_each_piece(groups: int, samples: int, ranks: int) -> None:
    training_pass = train("m", grpo(1, groups, samples, 30), "ppo")
    tree = prefix_tree(training_pass.data)
    for _, piece in _plan([training_pass], ranks).pieces_of(0):
        assert piece.rows == tree.rows(piece.data)
        assert piece.rows <= BUDGET or len(piece.data) == 1
