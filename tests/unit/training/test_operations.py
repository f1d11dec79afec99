"""How many operations a micro-batch starts on a GPU, counted on the CPU, beside a PEFT loop's: docs/gpu.md says why."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.operations import ROWS, Counts, counts, make_small

MOST = {"uniform": 0.5, "uniform-8": 0.5, "uniform-ranks": 0.5, "grpo": 0.65, "grpo-8": 0.8}
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


def test_an_optimizer_step_is_one_over_all_layers(counted: dict[str, tuple[Counts, Counts]]) -> None:
    for _, ours in counted.values():
        assert ours.layer["optimizer"] == 0
        assert ours.rest["optimizer"] == counted["uniform"][1].rest["optimizer"]


def test_a_micro_batch_of_eight_tenants_has_hardly_more_bookkeeping_than_one_of_one(
    counted: dict[str, tuple[Counts, Counts]],
) -> None:
    for name, most in (("uniform", 1.5), ("grpo", 1.75)):  # GRPO's other lengths need more masks
        one, eight = (counted[of_tenants][1].rest for of_tenants in (name, f"{name}-8"))
        assert one["bookkeeping"] >= 5, "losses are counted"
        assert eight["bookkeeping"] <= most * one["bookkeeping"]
        assert eight["backward"] <= 2 * one["backward"]
        # the numbers of all passes, and the command's end; the norm and the end of an optimizer step
        assert one["waits"] == 4
        assert eight["waits"] == one["waits"] + 1, "all norms at once, so that a pass can fail alone"
