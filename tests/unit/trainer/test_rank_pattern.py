"""Other ranks in some layers: what PEFT computes and trains with the same pattern, what files hold and which are
loaded, on one device, over ranks, and beside adapters of one rank."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch_lora_support import (
    assert_close,
    assert_same,
    base_path,
    make_backend,
    ok,
    saved,
    sft,
    spec,
    stock_logprobs,
    stock_terms,
    train,
)
from trainer_kinds import EXPERTS, LORA, Kind
from transformers import AutoModelForCausalLM

from skyrl.base.types.weights import LoraSpec, RankPattern
from skyrl.trainer.lora.rank_pattern import ranks_of, written_pattern
from skyrl.trainer.protocol import AdamParams, InvalidRequest
from skyrl.trainer.ranks.lora_backend import LoraBackend
from skyrl.trainer.tools.merge_adapter import merge

LENGTHS = (7, 31, 18)
PATTERN: RankPattern = ((r"layers\.0\.self_attn\.(q|k)_proj", 2), (r"k_proj", 16), (r"1\.mlp\..*", 5), ("lm_head", 3))
STEP = AdamParams(learning_rate=1e-2, eps=1e-8)


def patterned(pattern: RankPattern = PATTERN, seed: int = 5) -> LoraSpec:
    return replace(spec(8, seed), rank_pattern=pattern)


def _stock(architecture: str = "qwen3") -> Any:
    return AutoModelForCausalLM.from_pretrained(base_path(architecture), attn_implementation="eager").eval()


def _trained(backend: LoraBackend, model_id: str = "m", pattern: RankPattern = PATTERN) -> LoraBackend:
    """With a model that has made a step and has a pending gradient."""
    backend.create_model(model_id, patterned(pattern))
    ok(backend.run([train(model_id, sft(0, *LENGTHS))]))
    backend.optim_step(model_id, STEP)
    ok(backend.run([train(model_id, sft(1, *LENGTHS))]))
    return backend


def test_ranks_are_those_of_peft_with_the_same_pattern() -> None:
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]
    config = LoraConfig(r=8, lora_alpha=32, target_modules=names, rank_pattern=dict(PATTERN))
    theirs = {
        name.removeprefix("base_model.model."): (module.r["default"], module.scaling["default"])
        for name, module in get_peft_model(_stock(), config).named_modules()
        if hasattr(module, "lora_A")
    }
    found = dict(zip(theirs, ranks_of(8, PATTERN, [*theirs]), strict=True))
    assert found == {name: rank for name, (rank, _) in theirs.items()}
    assert {*found.values()} == {2, 3, 5, 8, 16}, "the first expression that matches decides"
    assert {rank: 32 / rank for rank in found.values()} == dict(theirs.values())


def test_training_equals_peft_with_the_files_that_were_saved(tmp_path: Path) -> None:
    """Forward, gradients and three optimizer steps; then PEFT reads the trained adapter, too."""
    backend = make_backend(micro_batch_tokens=50)
    backend.create_model("m", patterned())
    ok(backend.run([train("m", sft(0, *LENGTHS))]))
    backend.optim_step("m", STEP)  # lora_B is not 0
    backend.save_adapter("m", tmp_path)
    model = PeftModel.from_pretrained(_stock(), str(tmp_path), is_trainable=True).eval()
    leaves = {name.replace(".default", ""): one for name, one in model.named_parameters() if one.requires_grad}
    optimizer = torch.optim.AdamW(leaves.values(), lr=1e-2, eps=1e-8, betas=(0.9, 0.95), weight_decay=0.0)
    (backend_again := make_backend()).create_model("m", patterned(seed=6))
    saved(backend, "m", tmp_path / "state")
    backend_again.load_state("m", tmp_path / "state", optimizer=False)  # both begin without moments
    for step in range(1, 4):
        data = sft(step, *LENGTHS)
        (result,) = ok(backend_again.run([train("m", data)]))
        loss = torch.zeros(())
        for datum, logprobs in zip(data, result.logprobs, strict=True):
            lp = stock_logprobs(model, datum)
            np.testing.assert_allclose(logprobs, lp.detach(), atol=5e-5)
            loss = loss + stock_terms(lp, datum).sum()
        loss.backward()
        ours = {
            name: one
            for name, one in saved(backend_again, "m", tmp_path / str(step)).items()
            if name.startswith("gradient.")
        }
        cut = {name.removeprefix("base_model.model.").removesuffix(".weight"): one for name, one in leaves.items()}
        assert_close(ours, {f"gradient.{name}": one.grad for name, one in cut.items() if one.grad is not None}, 1e-4)
        backend_again.optim_step("m", STEP)
        optimizer.step()
        optimizer.zero_grad()
    (tmp_path / "end").mkdir()
    backend_again.save_adapter("m", tmp_path / "end")
    end = load_file(tmp_path / "end" / "adapter_model.safetensors")
    assert end.keys() == leaves.keys()
    for name, value in end.items():
        torch.testing.assert_close(value, leaves[name].detach(), atol=1e-5, rtol=1e-5)


def test_the_files_name_the_ranks_and_a_merge_computes_the_same(tmp_path: Path) -> None:
    backend = _trained(make_backend())
    backend.save_adapter("m", tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["r"] == 8
    assert config["rank_pattern"] == {
        "lm_head": 3,
        r"model\.layers\.(?:0)\.self_attn\.q_proj": 2,
        r"model\.layers\.(?:0)\.self_attn\.k_proj": 2,
        r"model\.layers\.(?:1)\.self_attn\.k_proj": 16,
        **{rf"model\.layers\.(?:1)\.mlp\.{leaf}_proj": 5 for leaf in ("gate", "up", "down")},
    }
    merge(base_path(), tmp_path, tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", attn_implementation="eager").eval()
    data = sft(3, *LENGTHS)
    (result,) = ok(backend.run([replace(train("m", data), backward=False)]))
    for datum, logprobs in zip(data, result.logprobs, strict=True):
        np.testing.assert_allclose(logprobs, stock_logprobs(merged, datum).detach(), atol=5e-5)
    plain = _trained(make_backend(), pattern=())
    plain.save_adapter("m", tmp_path)
    assert "rank_pattern" not in json.loads((tmp_path / "adapter_config.json").read_text())


def test_layers_that_differ_in_their_number_alone_are_one_expression() -> None:
    ranks = {rf"model\.layers\.{n}\.{leaf}": 4 if n < 20 else 8 for n in range(30) for leaf in ("a", "b")}
    numbers = "|".join(map(str, range(20)))
    assert written_pattern(8, ranks) == {rf"model\.layers\.(?:{numbers})\.{leaf}": 4 for leaf in ("a", "b")}


def test_a_state_is_the_same_after_a_load_and_other_ranks_are_refused(tmp_path: Path) -> None:
    before = saved(_trained(make_backend()), "m", tmp_path / "one")
    restored = make_backend()
    restored.restore_model("r", patterned(), tmp_path / "one")
    assert_same(saved(restored, "r", tmp_path / "two"), before)
    restored.create_model("same", patterned((("k_proj", 16), ("q_proj", 2)), seed=9))
    for model_id, pattern, said in (
        ("m", (), r"has rank 2 in model\.layers\.0\.self_attn\.q_proj, this model has 8; the checkpoint's pattern"),
        ("n", (*PATTERN[:3], ("lm_head", 4)), "has rank 3 in lm_head, this model has 4"),
    ):
        restored.create_model(model_id, patterned(pattern))
        kept = saved(restored, model_id, tmp_path / model_id)
        with pytest.raises(InvalidRequest, match=said):
            restored.load_state(model_id, tmp_path / "one", optimizer=True)
        assert_same(saved(restored, model_id, tmp_path / model_id), kept)
    plain = saved(_trained(make_backend(), pattern=()), "m", tmp_path / "plain")
    assert plain.keys() == before.keys()
    with pytest.raises(InvalidRequest, match=r"lora_config.rank_pattern: the saved adapter has rank 8 in model"):
        restored.load_state("r", tmp_path / "plain", optimizer=False)


def test_another_text_of_the_same_ranks_takes_the_state(tmp_path: Path) -> None:
    before = saved(_trained(make_backend()), "m", tmp_path / "one")
    names = (r"model\.layers\.0\.self_attn\.k_proj", 2), (r".*layers\.0.*q_proj", 2), (r"model\.layers\.1\.mlp\.\w+", 5)
    other = make_backend()
    other.create_model("m", patterned((*names, (r".*k_proj", 16), (r"lm_\w+", 3)), seed=1))
    other.load_state("m", tmp_path / "one", optimizer=True)
    assert_same(saved(other, "m", tmp_path / "two"), before)


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ((("q_poj", 4),), "'q_poj' matches no trained layer"),
        ((("proj", 4),), "'proj' matches no trained layer"),
        ((("q_proj", 4), (r"layers\.0\.self_attn\.q_proj", 2)), r"'layers.+ or only layers that an expression before"),
        ((("q_proj", 33),), "rank_pattern: 'q_proj' must have 1 to 32, got 33"),
        ((("q_proj", 0),), "rank_pattern: 'q_proj' must have 1 to 32, got 0"),
    ],
)
def test_a_pattern_that_cannot_be_meant_is_refused_by_name(pattern: RankPattern, said: str) -> None:
    backend = make_backend()
    with pytest.raises(InvalidRequest, match=said):
        backend.create_model("m", patterned(pattern))
    backend.create_model("m", patterned())


def test_layers_that_are_not_trained_match_nothing() -> None:
    without = replace(patterned((("up_proj", 4),)), train_mlp=False)
    with pytest.raises(InvalidRequest, match=r"layers are model.layers.0.self_attn.q_proj, .*o_proj, lm_head$"):
        make_backend().create_model("m", without)


def test_adapters_of_several_ranks_train_beside_each_other(tmp_path: Path) -> None:
    """In one micro-batch the others' results are the same as alone."""
    merged, alone = make_backend(merge=True), make_backend()
    for backend in (merged, alone):
        for model_id, pattern in (("a", ()), ("b", PATTERN), ("c", (("q_proj", 1),))):
            backend.create_model(model_id, patterned(pattern, seed=ord(model_id)))
    for step in range(2):
        passes = [train(model_id, sft(step, *LENGTHS)) for model_id in "abc"]
        together = ok(merged.run(passes))
        apart = [ok(alone.run([each]))[0] for each in passes]
        for one, other in zip(together, apart, strict=True):
            for ours, theirs in zip(one.logprobs, other.logprobs, strict=True):
                np.testing.assert_allclose(ours, theirs, atol=2e-5)
        for backend in (merged, alone):
            for model_id in "abc":
                backend.optim_step(model_id, STEP)
    for model_id in "abc":
        one, other = (saved(each, model_id, tmp_path / model_id / str(n)) for n, each in enumerate((merged, alone)))
        assert_close(one, other, 1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [LORA, EXPERTS], ids=str)
def test_several_ranks_train_what_one_trains(tmp_path: Path, kind: Kind) -> None:
    pattern = (("q_proj", 2), (r"0\.mlp\..*down_proj", 3), ("lm_head", 16))
    one = saved(_trained(kind.backend(), pattern=pattern), "m", tmp_path / "one")
    backend = kind.backend(2)
    try:
        several = saved(_trained(backend, pattern=pattern), "m", tmp_path / "two")
        backend.restore_model("r", patterned(pattern), tmp_path / "two")
        assert_same(saved(backend, "r", tmp_path / "three"), several)
    finally:
        backend.close()
    assert_close(several, one, kind.tolerance)
