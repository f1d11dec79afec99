"""Classes of row counts, and what they cost."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np
import pytest

from skyrl.trainer.graphs.row_classes import MULTIPLE, LearnedClasses, RowClasses


def mixture(seed: int, count: int = 400) -> list[int]:
    """Micro-batches of three trainings, near 7,900, 2,100 and 600 rows, and of others with 256 to 8,192."""
    rng = np.random.default_rng(seed)
    kinds = [rng.normal(centre, spread, count) for centre, spread in ((7900, 150), (2100, 150), (600, 60))]
    rows = np.choose(rng.choice(4, count, p=(0.3, 0.3, 0.3, 0.1)), [*kinds, rng.integers(256, 8193, count)])
    return np.clip(rows, 64, 8192).astype(int).tolist()


def padding(sizes: Sequence[int], counts: Sequence[int]) -> float:
    """The rows that classes of these sizes add to micro-batches, divided by their own."""
    return sum(found for rows in counts if (found := RowClasses(tuple(sizes)).of(rows))) / sum(counts) - 1


def test_a_count_gets_the_smallest_class_that_holds_it() -> None:
    classes = RowClasses((64, 256, 1024))
    assert [classes.of(rows) for rows in (1, 64, 65, 256, 1000, 1024, 1025)] == [64, 64, 256, 256, 1024, 1024, None]


@pytest.mark.parametrize(("number", "most"), [(4, 0.11), (5, 0.09), (6, 0.07), (7, 0.065)])
def test_few_classes_cost_little_padding(number: int, most: float) -> None:
    """Also of counts that the classes have not seen; geometric classes cost 1.4 to 2.8 times as much."""
    counts = [rows for rows in mixture(1) if rows <= max(mixture(0))]
    sizes = RowClasses.fitting(mixture(0), number).sizes
    assert len(sizes) == number
    unseen = padding(sizes, counts)
    assert 0 < padding(sizes, mixture(0)) <= unseen * 1.05
    assert unseen < most
    geometric = [256 * 32 ** (step / (number - 1)) for step in range(number)]
    assert padding([-(-round(size) // MULTIPLE) * MULTIPLE for size in geometric], counts) > 1.4 * unseen


def test_classes_that_fit_add_the_fewest_rows_of_all() -> None:
    counts = np.random.default_rng(0).integers(1, 1500, 40).tolist()
    distinct = sorted({-(-rows // MULTIPLE) * MULTIPLE for rows in counts})
    for number in (1, 2, 3, 4):
        every = ((*sizes, distinct[-1]) for sizes in combinations(distinct[:-1], number - 1))
        assert padding(RowClasses.fitting(counts, number).sizes, counts) == min(padding(each, counts) for each in every)


def test_classes_that_fit_need_no_more_than_the_counts() -> None:
    assert RowClasses.fitting([100, 100, 500], 6).sizes == (128, 512)


def test_learned_classes_follow_the_training() -> None:
    learned = LearnedClasses(most=8192)
    first = [learned.of(rows) for rows in mixture(2, 40)]
    assert first[:31] == [None] * 31
    assert None not in first[31:]
    assert learned.generation == 1
    assert learned.of(9000) is None
    for rows in mixture(3, 300):
        learned.of(rows)
    assert learned.generation <= 3, "the same training needs no other classes"
    before = learned.classes
    for _ in range(256):
        learned.of(3300)
    assert learned.classes != before
    assert learned.of(3300) == 3328
