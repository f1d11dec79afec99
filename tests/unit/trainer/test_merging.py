"""`skyrl adapter`: the merged model computes in stock transformers what the adapter computes, also where the base model
ties lm_head to the embeddings; and an adapter without lm_head says what it leaves out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch_lora_support import base_path, make_backend, ok, sft, spec, stock_logprobs, train
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from skyrl.base.config.server import ConfigError
from skyrl.cli.main import app
from skyrl.trainer.files import tensor_files
from skyrl.trainer.protocol import AdamParams, TrainingPass
from skyrl.trainer.tools import merge_adapter as merging
from skyrl.trainer.tools.merge_adapter import leave_head_out, main, merge
from skyrl.trainer.tools.quantize import Scheme, quantize
from tests.families import make_family

DATA = sft(8, 7, 31, 18)


def trained(path: str, out: Path, **flags: bool) -> list[Any]:
    """Write an adapter of two optimizer steps to `out`. Returns the trainer's logprobs of DATA with it."""
    backend = make_backend(path=path)
    backend.create_model("m", spec(8, 5, **flags))
    for step in range(2):
        ok(backend.run([train("m", sft(step, 30, 17))]))
        backend.optim_step("m", AdamParams(learning_rate=1e-2))
    out.mkdir(parents=True)
    backend.save_adapter("m", out)
    (result,) = ok(backend.run([TrainingPass("m", DATA, "cross_entropy", backward=False)]))
    return result.logprobs


def distance(model: Any, logprobs: list[Any]) -> float:
    """The largest of transformers' logprobs of DATA from these, in nats."""
    apart = 0.0
    for datum, expected in zip(DATA, logprobs, strict=True):
        with torch.inference_mode():
            own = stock_logprobs(model, datum).float().numpy()
        apart = max(apart, float(np.abs(own - expected).max()))
    return apart


def loaded(path: Path | str) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3-tied", "qwen2", "llama"])
def test_a_merged_model_computes_what_the_adapter_computes(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_files, "AT_ONCE", 300)
    monkeypatch.setattr(merging, "SHARD", 60_000)
    base = base_path(architecture)
    logprobs = trained(base, tmp_path / "adapter")
    merged = merge(base, tmp_path / "adapter", tmp_path / "merged")
    assert distance(loaded(tmp_path / "merged"), logprobs) < 5e-5
    assert distance(loaded(base), logprobs) > 0.01
    assert (merged.untied is not None) == json.loads((Path(base) / "config.json").read_text())["tie_word_embeddings"]
    assert merged.layers == 15
    assert json.loads((tmp_path / "merged/config.json").read_text())["tie_word_embeddings"] is False
    backend = make_backend(path=str(tmp_path / "merged"))  # a trainer takes it as a base model
    backend.create_model("m", spec())
    (result,) = ok(backend.run([TrainingPass("m", DATA, "cross_entropy", backward=False)]))
    assert max(float(np.abs(a - b).max()) for a, b in zip(result.logprobs, logprobs, strict=True)) < 5e-5


def test_a_tied_model_keeps_its_embeddings_and_its_tie_if_the_adapter_has_no_lm_head(tmp_path: Path) -> None:
    base = base_path("qwen3-tied")
    embeddings = loaded(base).model.embed_tokens.weight
    for name, flags in (("whole", {}), ("without", {"train_unembed": False})):
        logprobs = trained(base, tmp_path / name, **flags)
        merged = merge(base, tmp_path / name, tmp_path / f"{name}-merged")
        model = loaded(tmp_path / f"{name}-merged")
        assert torch.equal(model.model.embed_tokens.weight, embeddings)
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == (name == "without")
        assert merged.more_bytes == (embeddings.nbytes if name == "whole" else 0)
        assert distance(model, logprobs) < 5e-5


def test_the_dtype_of_the_weights_can_be_chosen(tmp_path: Path) -> None:
    base = tmp_path / "base"
    loaded(base_path("qwen3-tied")).to(torch.bfloat16).save_pretrained(base)
    logprobs = trained(str(base), tmp_path / "adapter")
    apart: dict[str, float] = {}
    for name, dtype in (("own", None), ("float32", torch.float32)):
        merge(str(base), tmp_path / "adapter", tmp_path / name, dtype)
        weights = load_file(tmp_path / name / "model.safetensors")
        assert {each.dtype for each in weights.values()} == {dtype or torch.bfloat16}
        assert json.loads((tmp_path / name / "config.json").read_text())["dtype"] == (
            "bfloat16" if dtype is None else "float32"
        )
        model = AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32).eval()
        apart[name] = distance(model, logprobs)
    assert apart["float32"] < 5e-5 < apart["own"] < 0.2, "bfloat16 rounds the sums"


def test_a_quantized_release_is_merged_into_weights_in_full(tmp_path: Path) -> None:
    base, release = make_family("qwen3", tmp_path / "plain"), str(tmp_path / "release")
    quantize(base, tmp_path / "release", Scheme(4, 32))
    logprobs = trained(release, tmp_path / "adapter")
    merge(release, tmp_path / "adapter", tmp_path / "merged", torch.float32)
    assert "quantization_config" not in json.loads((tmp_path / "merged/config.json").read_text())
    assert distance(loaded(tmp_path / "merged"), logprobs) < 5e-5


def test_an_adapter_without_lm_head_is_the_same_elsewhere_and_says_what_is_left_out(tmp_path: Path) -> None:
    base = base_path("qwen2")
    whole = trained(base, tmp_path / "adapter")
    left = leave_head_out(tmp_path / "adapter", tmp_path / "left")
    before, after = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("adapter", "left"))
    assert {*before} - {*after} == {f"base_model.model.lm_head.lora_{which}.weight" for which in "AB"}
    assert all(torch.equal(before[name], each) for name, each in after.items())
    b, a = (before[f"base_model.model.lm_head.lora_{which}.weight"] for which in "BA")
    assert left.norm == pytest.approx(float((b @ a * 32 / 8).norm()), rel=1e-4)
    assert (left.layers, left.rank) == (14, 8)
    model = PeftModel.from_pretrained(loaded(base), str(tmp_path / "left")).merge_and_unload()
    assert not [name for name, _ in model.named_modules() if "lora" in name]
    assert distance(model, whole) > 0.01, "lm_head had learned something"
    merge(base, tmp_path / "left", tmp_path / "merged")
    ours = loaded(tmp_path / "merged").state_dict()
    for name, theirs in model.state_dict().items():
        torch.testing.assert_close(ours[name], theirs, atol=1e-6, rtol=1e-5)


def test_the_layers_of_an_adapter_without_lm_head_are_named_whatever_named_them_before(tmp_path: Path) -> None:
    base, adapter = base_path("qwen2"), tmp_path / "adapter"
    trained(base, adapter)
    without = changed(adapter, tmp_path / "without")
    described = json.loads((without / "adapter_config.json").read_text())
    del described["target_modules"]
    (without / "adapter_config.json").write_text(json.dumps(described))
    pattern = changed(adapter, tmp_path / "pattern", target_modules=r".*\.(\w_proj|\w+_proj)|lm_head")
    for number, each in enumerate((adapter, pattern, without)):
        out = tmp_path / str(number)
        leave_head_out(each, out)
        named = json.loads((out / "adapter_config.json").read_text())["target_modules"]
        assert sorted(named) == ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]


def changed(adapter: Path, out: Path, **config: Any) -> Path:
    out.mkdir()
    described = json.loads((adapter / "adapter_config.json").read_text()) | config
    (out / "adapter_config.json").write_text(json.dumps(described))
    save_file(load_file(adapter / "adapter_model.safetensors"), out / "adapter_model.safetensors")
    return out


def test_what_cannot_be_merged_is_refused_by_name(tmp_path: Path) -> None:
    base, adapter = base_path("qwen3-tied"), tmp_path / "adapter"
    trained(base, adapter)
    cases = [
        ("dora", {"use_dora": True}, "has use_dora, which is not known"),
        ("alpha", {"lora_alpha": None}, "no numbers r and lora_alpha"),
        ("rank", {"r": 4}, "not of rank 4"),
        ("kind", {"peft_type": "LOHA"}, "describes no LoRA adapter"),
        ("pattern", {"rank_pattern": {"q_proj": 4}}, r"q_proj that are not of rank 4"),
        ("group", {"rank_pattern": {"(q_proj": 4}}, "has a rank_pattern that cannot be used: missing"),
    ]
    for name, config, said in cases:
        with pytest.raises(ConfigError, match=said):
            merge(base, changed(adapter, tmp_path / name, **config), tmp_path / f"{name}-out")
        assert not (tmp_path / f"{name}-out").exists()
    with pytest.raises(ConfigError, match=r"has no adapter_config.json: unpack"):
        merge(base, tmp_path, tmp_path / "out")
    with pytest.raises(ConfigError, match=r"update of model.layers.0.\S+ is \[\d+, 48\], and the weight in .* is \["):
        merge(base_path("qwen2"), adapter, tmp_path / "out")
    with pytest.raises(ConfigError, match="is not empty"):
        merge(base, adapter, adapter)
    trained(base, tmp_path / "no-head", train_unembed=False)
    with pytest.raises(ConfigError, match="has no update of lm_head"):
        leave_head_out(tmp_path / "no-head", tmp_path / "out")
    mixture = base_path("mixture")
    trained(mixture, tmp_path / "experts")
    with pytest.raises(ConfigError, match="adapters on experts cannot be merged"):
        merge(mixture, tmp_path / "experts", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_process_says_what_it_has_done(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    base, adapter = base_path("qwen3-tied"), str(tmp_path / "adapter")
    trained(base, tmp_path / "adapter")
    main("merge", base, adapter, str(tmp_path / "merged"), "float32")
    assert "tie_word_embeddings is false in config.json" in capfd.readouterr().out
    main("without-lm-head", adapter, str(tmp_path / "left"))
    assert "Left out: its update of lm_head, of rank 8 and norm " in capfd.readouterr().out
    with pytest.raises(SystemExit) as ended:
        main("merge", base, str(tmp_path), str(tmp_path / "other"))
    assert ended.value.code == 2
    assert capfd.readouterr().err.startswith(f"skyrl adapter merge: {tmp_path} has no adapter_config.json")
    done = CliRunner().invoke(app, ["adapter", "merge", str(tmp_path / "none"), adapter, str(tmp_path / "other")])
    assert done.exit_code == 2
