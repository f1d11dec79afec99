"""The benchmark of training: its batches, its PEFT loops beside the backend, and its table."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from torch_lora_support import VOCAB, base_path

from benchmarks import trainer, trainer_flops
from benchmarks.trainer_process import Measured, Step
from benchmarks.trainer_rows import FULL, SMALL, BatchRow, Shape, TenantPass, tokens_of
from benchmarks.trainer_ways import PeftWay, SkyrlWay, Trained, Way, gaps

GRPO = BatchRow("grpo", "2 × 3", Shape(2, 3, (20, 30), (4, 9)))
CUT = BatchRow("cut", "2 × 3, 2 requests", Shape(2, 3, (20, 30), (4, 9)), requests=2)
CONFIG = {
    "num_hidden_layers": 2,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "vocab_size": 32,
}
TENANTS = BatchRow("tenants", "2 × (1 × 12)", Shape(1, 1, (0, 0), (12, 12)), (2, 8))


def test_every_row_has_the_lengths_that_it_says() -> None:
    by_name = {row.name: row.passes(512) for row in (*SMALL, *FULL)}
    assert [len(datum.tokens) for datum in by_name["uniform-8x128"][0].data] == [128] * 8
    assert [len(datum.tokens) for datum in by_name["long-8192"][0].data] == [8192]
    (group,) = by_name["grpo-4x16"]
    assert len(group.data) == 64
    assert all(512 + 32 <= len(datum.tokens) + 1 <= 512 + 64 for datum in group.data)
    prompts = {tuple(datum.tokens[:512]) for datum in group.data}
    assert len(prompts) == 4, "the samples of a group share their prompt"
    assert [each.rank for each in by_name["tenants-64"]] == [4, 8, 16, 32]
    assert {each.tokens for each in by_name["tenants-64"]} == {64}


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_each_step_of_a_redrawn_row_trains_its_own_batch() -> None:
    drawn: list[int] = []
    row = replace(GRPO, redrawn=True)

    def draw(step: int) -> list[TenantPass]:
        drawn.append(step)
        return row.passes(VOCAB, step)

    def after_three(redrawn: bool) -> tuple[list[Step], list[Step]]:
        found: list[list[Step]] = []
        for make in (lambda: PeftWay(base_path(), 1, packed=False), lambda: SkyrlWay(base_path(), 1, merge=False)):
            drawn.clear()
            measured = Measured(make, draw, redrawn=redrawn)
            found.append([measured.step(1), measured.step(2)])
            measured.close()
        return found[0], found[1]

    peft, skyrl = after_three(True)
    assert drawn == [0, 1, 2, 3, 4]
    assert [step.number for step in skyrl] == [2, 4]
    assert skyrl[0].tokens == tokens_of(row.passes(VOCAB, 2))
    assert skyrl[1].tokens == sum(tokens_of(row.passes(VOCAB, step)) for step in (3, 4)) / 2
    assert [step.tokens for step in peft] == [step.tokens for step in skyrl]
    assert skyrl[1].rows < skyrl[1].tokens < peft[1].rows, "shared prompts, and padding"
    assert gaps(skyrl[1].trained, peft[1].trained, row.passes(VOCAB, 4))[1] < 1e-4
    after_three(False)
    assert drawn == [0]


def _trained(make: Callable[[], Way], passes: list[TenantPass]) -> list[Trained]:
    way = make()
    way.start(passes)
    for _ in range(2):
        way.step()
    found = way.step()
    way.close()
    return found


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
@pytest.mark.parametrize("row", [GRPO, CUT, TENANTS], ids=["grpo", "requests", "tenants"])
def test_all_ways_train_the_same(row: BatchRow) -> None:
    passes, model = row.passes(VOCAB), base_path()
    padded = _trained(lambda: PeftWay(model, 1, packed=False), passes)
    first = _trained(
        lambda: SkyrlWay(model, 1, merge=False), [TenantPass(2, each.loss_fn, each.data) for each in passes]
    )
    assert gaps(first, padded, passes)[1] > 1e-4, "another rank would show"
    for way in (
        lambda: PeftWay(model, 1, packed=True),
        lambda: SkyrlWay(model, 1, merge=False),
        lambda: SkyrlWay(model, 1, merge=True),
    ):
        of_loss, of_logprobs = gaps(_trained(way, passes), padded, passes)
        assert of_loss < 1e-5
        assert of_logprobs < 1e-4


def _step(wall_s: float, cpu_s: float, trained: list[Trained], share: float = 1.0) -> Step:
    """`share`: the part of the tokens that went through the model."""
    tokens = sum(len(each.logprobs) for each in trained)
    return Step(wall_s, cpu_s, tokens, share * tokens, 0, trained)


def test_ratios_are_medians_over_rounds_of_the_chosen_clock() -> None:
    passes = TENANTS.passes(VOCAB)
    trained = [Trained(1.0, np.zeros(each.tokens, np.float32), each.tokens) for each in passes]
    other = [Trained(1.0 + 1.2, np.full(each.tokens, 0.5, np.float32), each.tokens) for each in passes]
    steps = {
        "peft": [_step(2.0, 9.0, trained), _step(4.0, 9.0, trained), _step(3.0, 9.0, trained)],
        "skyrl": [_step(1.0, 3.0, other), _step(1.0, 3.0, other), _step(9.0, 3.0, other)],
    }
    peft, skyrl = trainer.results("", TENANTS, passes, steps, {"peft": 8.0, "skyrl": 4.0}, "wall")
    assert (peft["ratio"], skyrl["ratio"]) == (1.0, 2.0)
    assert skyrl["tokens_per_s"] == tokens_of(passes)
    assert skyrl["loss_gap"] == pytest.approx(0.1), "per target"
    assert skyrl["logprob_gap"] == 0.5
    assert trainer.results("", TENANTS, passes, steps, dict.fromkeys(steps), "cpu")[1]["ratio"] == 3.0


def test_model_flops_follow_the_formula(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    base = 2 * (8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 16) + 8 * 32
    adapter = 2 * (2 * (8 + 8) + 2 * (8 + 4) + 3 * (8 + 16)) + (8 + 32)
    shape = Shape(1, 2, (0, 0), (10, 10))
    passes = [TenantPass(4, "cross_entropy", shape.data(32, 0))]
    attention = 2 * 12 * 2 * 2 * 4 * 10 * 10
    assert trainer_flops.model_flops(str(tmp_path), passes) == 20 * (4 * base + 6 * 4 * adapter) + attention
    of_rows = trainer_flops.computed_flops(str(tmp_path), passes, 15)
    assert of_rows == (20 * (4 * base + 6 * 4 * adapter) + attention / 2) * 15 / 20
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "NVIDIA H100 PCIe")
    assert trainer_flops.peak_flops() == 756e12
