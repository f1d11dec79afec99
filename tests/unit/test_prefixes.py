"""Trees of common prefixes, their layouts, and attention over them."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from skyrl.backends.base import Datum
from skyrl.backends.torch_lora import prefixes
from skyrl.backends.torch_lora.attention import segments_attention
from skyrl.backends.torch_lora.packing import pack
from skyrl.backends.torch_lora.prefixes import PrefixTree, lay_out, prefix_tree

CPU = torch.device("cpu")
SEQUENCES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=12)
"""Few token ids, so that many sequences have common prefixes, are equal, or continue others."""


def _data(*sequences: list[int]) -> list[Datum]:
    return [Datum(np.array(tokens), {}) for tokens in sequences]


def _tree(data: list[Datum], least: int) -> PrefixTree:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefixes, "MIN_SAVED_ROWS", least)
        return prefix_tree(data)


def _distinct_prefixes(sequences: list[list[int]]) -> int:
    return len({tuple(tokens[: stop + 1]) for tokens in sequences for stop in range(len(tokens))})


@given(SEQUENCES, st.integers(1, 6), st.data())
def test_every_sequence_finds_its_own_rows_in_order(
    sequences: list[list[int]], least: int, data: st.DataObject
) -> None:
    tree = _tree(_data(*sequences), least)
    indices = data.draw(st.lists(st.sampled_from(range(len(sequences))), min_size=1, unique=True))
    layout = lay_out(tree, indices)
    chosen = [np.array(sequences[index]) for index in indices]
    assert layout.rows == tree.rows(indices)
    tokens = layout.of_rows(chosen)
    positions = layout.of_rows([np.arange(len(each)) for each in chosen])
    for rows, expected in zip(layout.rows_of, chosen, strict=True):
        np.testing.assert_array_equal(tokens[rows], expected)
        np.testing.assert_array_equal(positions[rows], np.arange(len(expected)))
    assert set(np.concatenate(layout.rows_of)) == set(range(layout.rows))
    packed = pack([Datum(each, {}) for each in chosen], layout, 5, CPU)
    np.testing.assert_array_equal(packed.positions.numpy(), positions)
    assert packed.stop - packed.start == layout.rows == sum(sum(group.pieces) for group in packed.groups)


@given(SEQUENCES)
def test_without_a_threshold_each_distinct_prefix_has_one_row(sequences: list[list[int]]) -> None:
    assert _tree(_data(*sequences), 1).rows(range(len(sequences))) == _distinct_prefixes(sequences)
    unshared = _tree(_data(*sequences), 10**9)
    assert unshared.rows(range(len(sequences))) == sum(map(len, sequences))
    assert [family[0] for family in unshared.families] == list(range(len(sequences)))


@given(SEQUENCES, st.integers(1, 6), st.integers(1, 30))
def test_parts_keep_the_budget_and_families_together(sequences: list[list[int]], least: int, budget: int) -> None:
    tree = _tree(_data(*sequences), least)
    parts = tree.cut(budget)
    assert sorted(index for part in parts for index in part) == list(range(len(sequences)))
    assert all(tree.rows(part) <= budget or len(part) == 1 for part in parts)
    assert all(part == sorted(part) for part in parts)
    for family in tree.families:
        if tree.rows(family) <= budget:
            assert sum(not set(family).isdisjoint(part) for part in parts) == 1
    assert not any(tree.rows([*one, *other]) <= budget for one, other in pairwise(parts) if len(other) == 1)


def test_a_branch_that_saves_too_few_rows_is_not_made() -> None:
    prompt = list(range(10, 30))
    samples = [[*prompt, 1, 2, 3], [*prompt, 1, 2, 4], [*prompt, 5, 6]]
    tree = _tree(_data(*samples, [10, 11, 12]), 16)
    assert tree.rows(range(4)) == 20 + 3 + 3 + 2 + 3, "the two rows of [1, 2] would save 2, the prompt's first three 3"
    assert len(lay_out(tree, range(4)).segments) == 5


def test_a_long_chain_of_turns_is_one_segment() -> None:
    turns = [list(range(stop)) for stop in range(1, 1500)]
    tree = _tree(_data(*reversed(turns)), 1)
    layout = lay_out(tree, range(len(turns)))
    assert layout.rows == len(layout.rows_of[0]) == 1499
    assert len(layout.segments) == 1


def test_rows_with_other_routed_experts_are_not_shared() -> None:
    tokens = np.arange(40)
    experts = np.tile(np.array([[[0, 1], [2, 3]]]), (40, 1, 1))
    others = experts.copy()
    others[30:, 1] = [3, 2]
    same = [Datum(tokens, {"routed_experts": experts}) for _ in range(2)]
    assert prefix_tree(same).rows([0, 1]) == 40
    different = [same[0], Datum(tokens, {"routed_experts": others})]
    assert prefix_tree(different).rows([0, 1]) == 30 + 10 + 10
    without = [same[0], Datum(tokens, {})]
    assert prefix_tree(without).rows([0, 1]) == 40 + 40


def _alone(query: Tensor, key: Tensor, value: Tensor, window: int | None) -> Tensor:
    """Causal attention of one sequence; query [rows, heads, head_dim], with half as many heads of keys and values."""
    key, value = key.repeat_interleave(2, 1), value.repeat_interleave(2, 1)
    scores = torch.einsum("ihd,jhd->hij", query, key) * query.shape[-1] ** -0.5
    places = torch.arange(len(query))
    distance = places[:, None] - places
    hidden = (distance < 0) | (distance >= (window or len(query)))
    return torch.einsum("hij,jhd->ihd", scores.masked_fill(hidden, -torch.inf).softmax(-1), value)


@given(st.lists(SEQUENCES, min_size=1, max_size=3), st.sampled_from([None, 1, 2, 4]))
def test_attention_over_shared_rows_is_that_of_each_sequence_alone(
    slices: list[list[list[int]]], window: int | None
) -> None:
    start, packed = 0, []
    for sequences in slices:
        data = _data(*sequences)
        packed.append(pack(data, lay_out(_tree(data, 2), range(len(data))), start, CPU))
        start = packed[-1].stop
    generator = torch.Generator().manual_seed(0)
    states = [torch.randn(start, heads, 4, dtype=torch.float64, generator=generator) for heads in (4, 2, 2)]
    query, key, value = (each.transpose(0, 1)[None] for each in states)
    output, _ = segments_attention(
        nn.Identity(), query, key, value, None, attention_groups=[each.groups for each in packed], sliding_window=window
    )
    for each in packed:
        for rows in each.layout.rows_of:
            places = each.start + torch.from_numpy(rows)
            query, key, value = (part[places] for part in states)
            torch.testing.assert_close(output[0, places], _alone(query, key, value, window))
