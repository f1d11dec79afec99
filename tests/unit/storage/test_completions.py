"""The block of numbers of each copy of a sampling client, and the cursors of ended samples."""

from __future__ import annotations

import pytest

from skyrl.storage.futures.completion_feed import CLONE_BLOCK, Completion, block_of, clone_of


@pytest.mark.parametrize("clone", [0, 1, 2, 10**9])
def test_all_numbers_of_a_block_belong_to_its_clone(clone: int) -> None:
    first, end = block_of(clone)
    assert clone_of(first) == clone_of(end - 1) == clone
    assert clone_of(end) == clone + 1
    assert end - (first or 0) == CLONE_BLOCK


def test_samples_that_end_two_microseconds_apart_have_different_cursors() -> None:
    moment, cursors = 1800000000.0, []
    for _ in range(1_000):
        cursors.append(Completion("sample", 1, moment).cursor)
        moment += 2e-6
    assert cursors == sorted(set(cursors))
