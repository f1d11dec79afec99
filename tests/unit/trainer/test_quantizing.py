"""`skyrl quantize` rounds a model's large matrices to the nearest integers, and writes a release that trainer, vLLM and
compressed-tensors' own library read alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, CompressedTensorsConfig
from typer.testing import CliRunner

from skyrl.base.config.server import ConfigError
from skyrl.cli.main import app
from skyrl.trainer.files import tensor_files
from skyrl.trainer.model.loading import load_model
from skyrl.trainer.quantized.weights import QuantizedWeight, held_bytes
from skyrl.trainer.tools import quantize as release
from skyrl.trainer.tools.quantize import SMALL, Scheme, main, quantize
from tests.families import make_family
from tests.quantized import INT4, int4
from tests.quantized import quantize as quantized_simply

LATENT = {"q_lora_rank": 64, "kv_lora_rank": 32, "v_head_dim": 32}
EXPERTS = {"moe_intermediate_size": 64}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("qwen3", {}),
    "mixture": ("qwen3-moe", EXPERTS),
    "latent-mixture": ("deepseek-v3", LATENT | EXPERTS),
    "delta-rule": ("qwen3.5", {}),
}


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("case", CASES)
def test_large_matrices_are_within_half_a_step_and_all_else_is_unchanged(case: str, bits: int, tmp_path: Path) -> None:
    family, shape = CASES[case]
    path = make_family(family, tmp_path, **shape)
    quantize(path, tmp_path / "out", Scheme(bits, 32))
    before = dict(load_model(path, torch.float32).named_parameters())
    after = load_model(str(tmp_path / "out"), torch.float32, keep_quantized=True)
    quantized = set()
    for name, weight in after.named_parameters():
        if not isinstance(weight, QuantizedWeight):
            assert torch.equal(weight, before[name]), name
            continue
        quantized.add(name)
        groups = before[name].unflatten(-1, (-1, 32))
        step = groups.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 0.5)
        apart = (weight.whole().unflatten(-1, (-1, 32)) - groups).abs()
        assert bool((apart <= 0.5 * step * 1.02 + groups.abs() / 256).all()), f"{name}: factors are in bfloat16"
        assert 8 * held_bytes([weight]) / weight.numel() == bits + 16 / 32
    layers = [name for name in before if ".layers." in name and before[name].ndim > 1 and "conv" not in name]
    left = {name for name in set(layers) - quantized if ".gate.weight" not in name}
    assert {name.split(".")[-2] for name in left} <= set(SMALL), "beside routers"
    assert len(quantized) >= 8


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("case", ["dense", "latent-mixture"])
@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # the import of compressed-tensors
def test_the_formats_own_library_reads_the_same_weights(case: str, bits: int, tmp_path: Path) -> None:
    family, shape = CASES[case]
    quantize(make_family(family, tmp_path, **shape), tmp_path / "out", Scheme(bits, 32))
    read: Any = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32, quantization_config=CompressedTensorsConfig(dequantize=True)
    )
    theirs = dict(read.named_parameters())
    for name, weight in load_model(str(tmp_path / "out"), torch.float32).named_parameters():
        read_dtype = theirs[name].dtype  # bfloat16 for experts, whatever was asked for
        assert torch.equal(weight.to(read_dtype), theirs[name]), name


def test_rows_are_rounded_in_parts_as_all_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_family("qwen3", tmp_path)
    quantize(path, tmp_path / "whole", Scheme(4, 32))
    monkeypatch.setattr(tensor_files, "AT_ONCE", 300)
    monkeypatch.setattr(release, "SHARD", 40_000)
    quantize(path, tmp_path / "parts", Scheme(4, 32))
    files = sorted((tmp_path / "parts").glob("model-*.safetensors"))
    assert len(files) > 2
    parts = {name: tensor for file in files for name, tensor in load_file(file).items()}
    whole = load_file(tmp_path / "whole" / "model.safetensors")
    assert parts.keys() == whole.keys()
    assert all(torch.equal(parts[name], tensor) for name, tensor in whole.items())
    index = json.loads((tmp_path / "parts" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == whole.keys()


def test_a_group_of_zeros_stays_zero() -> None:
    packed, factors = Scheme(8, 32).rounded(torch.zeros(2, 64))
    assert packed.view(torch.uint8).unique().tolist() == [128]
    assert not factors.any()


def test_what_cannot_be_quantized_is_refused(tmp_path: Path) -> None:
    plain = make_family("qwen3", tmp_path)

    def refused(path: str, said: str, group_size: int = 32) -> None:
        out = tmp_path / f"out{len(list(tmp_path.iterdir()))}"
        with pytest.raises(ConfigError, match=said):
            quantize(path, out, Scheme(4, group_size))
        assert not (out / "config.json").exists(), "nothing loads what is left"

    refused(quantized_simply(plain, tmp_path / "again", INT4, int4()), "is quantized already")
    refused(make_family("gpt-oss", tmp_path), r"experts.* holds all experts of a layer, \[4, ")
    refused(plain, r"^group-size: .* has 96 columns, which groups of 128 do not divide: try --group-size 32$", 128)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(ConfigError, match="full is not empty"):
        quantize(plain, tmp_path / "full", Scheme(4, 32))
    file = Path(plain) / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.mlp.up_proj.weight"][3, 5] = torch.inf
    save_file(tensors, file, metadata={"format": "pt"})
    refused(plain, r"^model.layers.0.mlp.up_proj.weight cannot be quantized: it has numbers that are not finite")


def test_the_command_ends_with_2_and_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(str(tmp_path / "missing"), str(tmp_path / "out"), "4", "32")
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith(f"skyrl quantize: cannot load {tmp_path / 'missing'}")
    for arguments, said in [(["model", "--bits", "5"], "'5' is not one of"), ([str(tmp_path)], "is empty")]:
        done = CliRunner().invoke(app, ["quantize", *arguments, str(tmp_path / "out")])
        assert done.exit_code == 2
        assert said in done.output
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_command_knows_the_tiny_model(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = CliRunner().invoke(app, ["quantize", "tiny", str(out), "--group-size", "64"])
    assert done.exit_code == 0, done.output
    assert held_bytes(load_model(str(out), torch.float32, keep_quantized=True).parameters()) < 900_000, "in full 2.6 MB"
