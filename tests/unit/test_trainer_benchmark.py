"""The benchmark of training: its batches, its PEFT loops beside the backend, and its table."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from torch_lora_support import VOCAB, base_path

from benchmarks import trainer, trainer_flops
from benchmarks.models import make_long_tiny
from benchmarks.trainer_process import Step
from benchmarks.trainer_rows import FULL, SMALL, BatchRow, Shape, TenantPass, tokens_of
from benchmarks.trainer_ways import PeftWay, SkyrlWay, Trained, Way, gaps

GRPO = BatchRow("grpo", "2 × 3", Shape(2, 3, (20, 30), (4, 9)))
CUT = BatchRow("cut", "2 × 3, 2 requests", Shape(2, 3, (20, 30), (4, 9)), requests=2)
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


def test_requests_hold_the_whole_batch_and_end_in_the_midst_of_groups() -> None:
    by_name = {row.name: row.passes(512) for row in FULL}
    (whole,), (cut,) = by_name["grpo-4x16"], by_name["grpo-4x16-in-6"]
    assert [len(part) for part in whole.parts] == [64]
    assert [len(part) for part in cut.parts] == [10, 11, 11, 10, 11, 11]
    assert [datum for part in cut.parts for datum in part] == cut.data


def test_only_the_tokens_of_answers_have_advantages() -> None:
    for datum in GRPO.passes(VOCAB)[0].data:
        prompt = int(np.flatnonzero(datum.loss_inputs["advantages"])[0]) + 1
        assert 20 <= prompt <= 30
        assert (datum.loss_inputs["advantages"][prompt - 1 :] != 0).all()
        assert (datum.loss_inputs["logprobs"] != 0).tolist() == (datum.loss_inputs["advantages"] != 0).tolist()


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


def test_peft_micro_batches_hold_what_the_logits_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.trainer_ways.LOGITS_BYTES", 4 * VOCAB * 40)
    padded, packed = (PeftWay(base_path(), 1, packed=packed) for packed in (False, True))
    lengths = [10, 20, 10, 50, 5, 5]
    assert list(padded._micro_batches(lengths)) == [(0, 2), (2, 3), (3, 4), (4, 6)]
    assert list(packed._micro_batches(lengths)) == [(0, 3), (3, 4), (4, 6)]


@pytest.mark.slow
def test_a_row_is_measured_in_processes_and_becomes_a_table(tmp_path: Path) -> None:
    model = make_long_tiny(tmp_path / "tiny")
    found = trainer.measure(model, TENANTS, ("peft", "skyrl-merged"), rounds=1, threads=1, clock="cpu")
    assert [each["way"] for each in found] == ["peft", "skyrl-merged"]
    assert all(each["tokens_per_s"] > 0 and each["peak_mib"] is not None for each in found)
    assert found[0]["ratio"] == 1
    assert found[1]["logprob_gap"] < 1e-4
    json.dumps(found)
    lines = trainer.table({"tiny": found}).splitlines()
    assert lines[1] == "tiny, tenants: 2 × (1 × 12) (24 tokens)"
    assert [line.split()[0] for line in lines[2:]] == ["peft", "skyrl-merged"]


def test_ratios_are_medians_over_rounds_of_the_chosen_clock() -> None:
    passes = TENANTS.passes(VOCAB)
    trained = [Trained(1.0, np.zeros(each.tokens, np.float32)) for each in passes]
    other = [Trained(1.0 + 1.2, np.full(each.tokens, 0.5, np.float32)) for each in passes]
    steps = {
        "peft": [Step(2.0, 9.0, trained), Step(4.0, 9.0, trained), Step(3.0, 9.0, trained)],
        "skyrl": [Step(1.0, 3.0, other), Step(1.0, 3.0, other), Step(9.0, 3.0, other)],
    }
    peft, skyrl = trainer.results("", TENANTS, passes, steps, {"peft": 8.0, "skyrl": 4.0}, "wall")
    assert (peft["ratio"], skyrl["ratio"]) == (1.0, 2.0)
    assert skyrl["tokens_per_s"] == tokens_of(passes)
    assert skyrl["loss_gap"] == pytest.approx(0.1), "per target"
    assert skyrl["logprob_gap"] == 0.5
    assert trainer.results("", TENANTS, passes, steps, dict.fromkeys(steps), "cpu")[1]["ratio"] == 3.0


def test_model_flops_follow_the_formula(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"num_hidden_layers": 2, "hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2}
    config |= {"num_key_value_heads": 1, "head_dim": 4, "vocab_size": 32}
    (tmp_path / "config.json").write_text(json.dumps(config))
    base = 2 * (8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 16) + 8 * 32
    adapter = 2 * (2 * (8 + 8) + 2 * (8 + 4) + 3 * (8 + 16)) + (8 + 32)
    shape = Shape(1, 2, (0, 0), (10, 10))
    passes = [TenantPass(4, "cross_entropy", shape.data(32, 0))]
    attention = 2 * 12 * 2 * 2 * 4 * 10 * 10
    assert trainer_flops.model_flops(str(tmp_path), passes) == 20 * (4 * base + 6 * 4 * adapter) + attention
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "NVIDIA H100 PCIe")
    assert trainer_flops.peak_flops() == 756e12
