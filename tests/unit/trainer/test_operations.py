"""How many operations a micro-batch starts on a GPU, counted on the CPU, beside a PEFT loop's: docs/gpu.md says why."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.models import make_small
from benchmarks.operations import ROWS, Counts, count, counts, names_of_layer
from benchmarks.trainer_rows import BatchRow

MOST = {"uniform": 0.35, "uniform-8": 0.42, "uniform-ranks": 0.42, "grpo-8": 0.55}
"""Operations of a layer over those of a PEFT loop with one tenant."""


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Counts, Counts]]:
    """By row: the counts of the PEFT loop, and those of the backend."""
    directory: Path = tmp_path_factory.mktemp("models")
    paths = [make_small(directory / str(layers), layers) for layers in (2, 4)]
    rows = [row for row in ROWS if row.name in MOST]
    peft = {False: counts(paths, rows[0], "peft"), True: counts(paths, rows[-1], "peft")}
    return {row.name: (peft[row.name.startswith("grpo")], counts(paths, row, "skyrl")) for row in rows}


def test_a_layer_starts_few_operations_also_with_eight_tenants(counted: dict[str, tuple[Counts, Counts]]) -> None:
    for name, (peft, ours) in counted.items():
        assert peft.of_layer > 200, "the loop's operations are counted"
        assert ours.of_layer <= MOST[name] * peft.of_layer, name


def test_a_layer_makes_no_masks_and_waits_for_nothing(counted: dict[str, tuple[Counts, Counts]]) -> None:
    for _, ours in counted.values():
        assert ours.layer["bookkeeping"] == ours.layer["uploads"] == ours.layer["waits"] == 0


def test_the_names_of_a_layers_operations_are_all_of_them(
    counted: dict[str, tuple[Counts, Counts]], tmp_path: Path
) -> None:
    names = names_of_layer([make_small(tmp_path / str(layers), layers) for layers in (2, 4)], ROWS[0], "skyrl")
    assert sum(names.values()) == counted["uniform"][1].of_layer
    assert names["forward: rms_norm"] == 4


def test_an_optimizer_step_is_one_over_all_layers(counted: dict[str, tuple[Counts, Counts]]) -> None:
    for _, ours in counted.values():
        assert ours.layer["optimizer"] == 0
        assert ours.rest["optimizer"] == counted["uniform"][1].rest["optimizer"]


@pytest.mark.parametrize("name", ["uniform-8", "grpo-8"])
def test_eight_tenants_have_hardly_more_bookkeeping_than_one_with_as_many_prompts(
    counted: dict[str, tuple[Counts, Counts]], tmp_path: Path, name: str
) -> None:
    """Masks depend on lengths: eight prompts of one tenant need as many."""
    eight, shape = counted[name][1].rest, next(row.shape for row in ROWS if row.name == name)
    one = count("skyrl", make_small(tmp_path, 2), BatchRow("one tenant", "", replace(shape, groups=8)))
    assert one["bookkeeping"] >= 5, "losses are counted"
    for_each = 2 * 8  # an adapter's matrices go into the stack, and its gradient out of it
    assert eight["bookkeeping"] <= 1.5 * one["bookkeeping"] + for_each
    assert one["waits"] == eight["waits"] == 4, (
        "for the numbers of all passes at once, for the norm of a step, and at the ends"
    )
