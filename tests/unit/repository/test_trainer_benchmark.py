"""The benchmark of training: its batches, its PEFT loops beside the backend, and its table."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from torch_lora_support import VOCAB, base_path

from benchmarks import trainer, trainer_flops, trainer_ways
from benchmarks.models import make_long_tiny
from benchmarks.trainer_process import Measured, Step
from benchmarks.trainer_rows import FULL, SMALL, BatchRow, Shape, TenantPass, tokens_of
from benchmarks.trainer_ways import PeftWay, SkyrlWay, Trained, Way, gaps, plain_device

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


def test_requests_hold_the_whole_batch_and_end_in_the_midst_of_groups() -> None:
    by_name = {row.name: row.passes(512) for row in FULL}
    (whole,), (cut,) = by_name["grpo-4x16"], by_name["grpo-4x16-in-6"]
    assert [len(part) for part in whole.parts] == [64]
    assert [len(part) for part in cut.parts] == [10, 11, 11, 10, 11, 11]
    assert [datum for part in cut.parts for datum in part] == cut.data


def test_a_redrawn_row_has_another_batch_of_the_same_shape_at_each_step() -> None:
    (row,) = (row for row in FULL if row.name == "grpo-new")
    (fixed,) = (row for row in FULL if row.name == "grpo-mixed")
    (first,), (second,), (again,) = row.passes(512, 1), row.passes(512, 2), row.passes(512, 1)
    assert len(first.data) == len(second.data) == 64
    lengths = [[len(datum.tokens) for datum in each.data] for each in (first, second, again)]
    assert lengths[0] != lengths[1]
    assert lengths[0] == lengths[2]
    assert all(256 + 32 <= length + 1 <= 1024 + 256 for length in lengths[0])
    assert fixed.passes(512, 1)[0].tokens == fixed.passes(512, 2)[0].tokens
    tenants = replace(row, ranks=(4, 8))
    seen = {tuple(each.data[0].tokens) for step in range(3) for each in tenants.passes(512, step)}
    assert len(seen) == 6, "no tenant gets another one's batch later"


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


def test_the_baseline_has_torchs_defaults_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server's settings of the device would slow it down."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    for name in ("torch.use_deterministic_algorithms", "torch.backends.cuda.enable_cudnn_sdp"):
        monkeypatch.setattr(name, lambda *_, **__: pytest.fail("a setting of the server"))
    assert plain_device(1).type == "cuda"
    assert not hasattr(trainer_ways, "prepare_device")


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


def _step(wall_s: float, cpu_s: float, trained: list[Trained], share: float = 1.0) -> Step:
    """`share`: the part of the tokens that went through the model."""
    tokens = sum(len(each.logprobs) for each in trained)
    return Step(wall_s, cpu_s, tokens, share * tokens, 0, trained)


def test_a_gpus_columns_are_the_mfu_of_all_tokens_and_that_of_computed_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    passes = TENANTS.passes(VOCAB)
    trained = [Trained(1.0, np.zeros(each.tokens, np.float32), each.tokens) for each in passes]
    flops = trainer_flops.model_flops(str(tmp_path), passes)
    monkeypatch.setattr(trainer, "peak_flops", lambda: flops)
    steps = {"peft": [_step(2.0, 2.0, trained)], "skyrl": [_step(0.5, 0.5, trained, 0.25)]}
    peft, skyrl = found = trainer.results(str(tmp_path), TENANTS, passes, steps, dict.fromkeys(steps), "wall")
    assert (peft["mfu"], skyrl["mfu"]) == (0.5, 2.0), "shared prompts count"
    assert 0.4 < skyrl["mfu_of_rows"] < 0.5
    assert skyrl["mfu_of_rows"] == pytest.approx(peft["mfu_of_rows"])
    header, *_, last = trainer.table({"tiny": found}).splitlines()
    assert header.split("  ")[-1].strip() == "MFU of computed rows"
    assert "max |loss − peft's|" in header
    assert last.split()[-2] == "2"


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
