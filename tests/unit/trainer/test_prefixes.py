"""Trees of common prefixes, their layouts, and attention over them."""

from __future__ import annotations

import tracemalloc
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from skyrl.trainer.attention.packed_attention import segments_attention
from skyrl.trainer.protocol import Datum
from skyrl.trainer.ranks.plan import cut_evenly
from skyrl.trainer.rows import prefixes
from skyrl.trainer.rows.packing import pack
from skyrl.trainer.rows.prefixes import MAX_COPIES, PrefixTree, bundled, copied_rows, lay_out, prefix_tree

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


@given(SEQUENCES, st.integers(1, 6), st.integers(0, 12))
def test_the_tree_of_sequences_that_share_nothing_with_others_is_a_part_of_the_common_tree(
    sequences: list[list[int]], least: int, first: int
) -> None:
    families = _tree(_data(*sequences), least).families
    own = [sequences[index] for family in families[:first] for index in sorted(family)]
    others = [sequences[index] for family in families[first:] for index in sorted(family)]
    common = _tree(_data(*own, *others), least)
    for start, part in ((0, own), (len(own), others)):
        if part:
            found, expected = common.of_range(start, start + len(part)), _tree(_data(*part), least)
            assert found.families == expected.families
            assert _rows_of_each(found) == _rows_of_each(expected)


def _rows_of_each(tree: PrefixTree) -> list[list[tuple[int, int, int]]]:
    """For each sequence the rows of its nodes, and a sequence that has them."""
    paths = [[tree.nodes[node] for node in tree.path(index)] for index in range(len(tree.ends))]
    return [[(node.start, node.stop, node.source) for node in path] for path in paths]


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


def _copies(data: list[Datum], tree: PrefixTree, part: list[int]) -> int:
    """The rows that a layer's attention copies: bundles times the rows before them."""
    packed = pack([data[index] for index in part], lay_out(tree, part), 0, CPU)
    sizes = [size for group in packed.groups for size in group.pieces]
    total = 0
    for group in packed.groups:
        if before := sum(sizes[number] for number in group.prefix):
            total += -(-group.count // bundled(group.count, group.longest, before)) * before
    assert total == copied_rows(lay_out(tree, part).segments)
    return total


def _branching(turns: int) -> list[Datum]:
    """A conversation of turns of 32 rows. Each datum ends in a token that the next one does not have."""
    return _data(*([*range(32 * turn), 9999] for turn in range(1, turns + 1)))


def test_a_conversation_that_branches_at_every_turn_copies_few_rows_in_each_slice() -> None:
    data = _branching(121)
    tree = prefix_tree(data)
    assert _copies(data, tree, [*range(121)]) > 100 * tree.rows(range(121)), "all turns in one slice"
    for parts in (tree.cut(4096), sum(cut_evenly(tree, 2, 4096), [])):
        assert sorted(index for part in parts for index in part) == list(range(121))
        assert all(_copies(data, tree, part) <= MAX_COPIES * tree.rows(part) for part in parts if part)
        assert sum(map(tree.rows, parts)) < sum(len(datum.tokens) for datum in data) / 6
    assert tree.cut(4096) == prefix_tree(_branching(121)).cut(4096)


def test_groups_of_samples_and_growing_conversations_stay_in_one_slice() -> None:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 100, 512) for _ in range(4)]
    answers = [rng.integers(100, 200, rng.integers(32, 65)) for _ in range(64)]
    data = [Datum(np.concatenate([prompts[number // 16], answer]), {}) for number, answer in enumerate(answers)]
    assert prefix_tree(data).cut(8192) == [[*range(64)]]
    growing = _data(*([*range(32 * turn)] for turn in range(1, 122)))
    tree = prefix_tree(growing)
    assert tree.cut(4096) == [[*range(121)]]
    assert _copies(growing, tree, [*range(121)]) == 0


@given(SEQUENCES, st.integers(0, 3), st.integers(1, 30), st.integers(1, 3))
def test_every_part_has_few_copies(sequences: list[list[int]], most: int, budget: int, ranks: int) -> None:
    data = _data(*sequences)
    tree = _tree(data, 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefixes, "MAX_COPIES", most)
        parts = tree.cut(budget)
        assert sorted(index for part in parts for index in part) == list(range(len(sequences)))
        assert all(_copies(data, tree, part) <= most * tree.rows(part) for part in parts)
        assert all(tree.fits(part, budget) for part in parts)
        assert all(tree.fits(part, budget) for parts in cut_evenly(tree, ranks, budget) for part in parts)


def test_routed_experts_are_unpacked_one_sequence_at_a_time() -> None:
    """Each sequence needs 1.6 MB unpacked, all together 26 MB."""
    rng = np.random.default_rng(0)
    packed = rng.integers(0, 255, (16, 1000, 48, 8), np.uint8)  # as with_sorted_experts leaves packed ones
    data = [Datum(rng.integers(0, 100, 1000), {"routed_experts": experts}) for experts in packed]
    tracemalloc.start()
    try:
        prefix_tree(data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 10 * 2**20


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


def _alone(
    query: Tensor, key: Tensor, value: Tensor, window: int | None, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Causal attention of one sequence; query [rows, heads, head_dim], with half as many heads of keys and values."""
    key, value = key.repeat_interleave(2, 1), value.repeat_interleave(2, 1)
    scores = torch.einsum("ihd,jhd->hij", query, key) * query.shape[-1] ** -0.5
    places = torch.arange(len(query))
    distance = places[:, None] - places
    hidden = (distance < 0) | (distance >= (window or len(query)))
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, len(query), 1)], dim=-1)
    return torch.einsum("hij,jhd->ihd", scores.softmax(-1)[..., : len(query)], value)


@given(
    st.lists(SEQUENCES, min_size=1, max_size=3),
    st.sampled_from([None, 1, 2, 4]),
    st.sampled_from([None, 1.5]),
    st.booleans(),
)
def test_attention_over_shared_rows_is_that_of_each_sequence_alone(
    slices: list[list[list[int]]], window: int | None, softcap: float | None, with_sinks: bool
) -> None:
    """With soft-capping or sinks the softmax is in float32."""
    start, packed = 0, []
    for sequences in slices:
        data = _data(*sequences)
        packed.append(pack(data, lay_out(_tree(data, 2), range(len(data))), start, CPU))
        start = packed[-1].stop
    generator = torch.Generator().manual_seed(0)
    states = [torch.randn(start, heads, 4, dtype=torch.float64, generator=generator) for heads in (4, 2, 2)]
    query, key, value = (each.transpose(0, 1)[None] for each in states)
    sinks = torch.randn(4, dtype=torch.float64, generator=generator) if with_sinks else None
    output, _ = segments_attention(
        nn.Identity(),
        query,
        key,
        value,
        None,
        attention_groups=[each.groups for each in packed],
        sliding_window=window,
        softcap=softcap,
        s_aux=sinks,
    )
    tolerance = 1e-9 if softcap is None and sinks is None else 2e-6
    for each in packed:
        for rows in each.layout.rows_of:
            places = each.start + torch.from_numpy(rows)
            query, key, value = (part[places] for part in states)
            expected = _alone(query, key, value, window, softcap, sinks)
            torch.testing.assert_close(output[0, places], expected, atol=tolerance, rtol=tolerance)
