"""The benchmark of pictures on a model of one layer: its ways train the same, and a group computes its prompt once."""

from __future__ import annotations

from pathlib import Path

from benchmarks.models import make_seeing
from benchmarks.pictures import measure, table


def test_all_ways_train_the_same_and_only_the_group_shares_its_prompt(tmp_path: Path) -> None:
    path = make_seeing(tmp_path, layers=1, depth=4)
    peft, group, apart = measure(path, side=64, samples=3, rounds=1)
    assert max(each["logprob_gap"] for each in (group, apart)) < 1e-4
    assert peft["ratio"] == 1
    prompt = 4 + 4 + 64
    assert apart["rows"] == group["rows"] + 2 * prompt
    assert table([peft, group, apart]).count("skyrl") == 2
