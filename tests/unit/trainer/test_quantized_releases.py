"""Quantized releases become the weights that transformers and compressed-tensors read from them, in one dtype, on one
device and on ranks."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch_lora_support import assert_same, make_ranks, ok, sft, spec, train
from trainer_kinds import WHOLE
from transformers import AutoModelForCausalLM, CompressedTensorsConfig, FineGrainedFP8Config, PreTrainedModel
from transformers.utils.quantization_config import Mxfp4Config

from skyrl.base.config.loading import load_config
from skyrl.base.config.server import ConfigError
from skyrl.trainer import create_backend
from skyrl.trainer.files.config import read_config
from skyrl.trainer.files.tensor_files import StoredWeights, weight_files
from skyrl.trainer.model.loading import load_model
from skyrl.trainer.quantized import format
from tests.families import make_family
from tests.quantized import BLOCK, FP8, GROUP, INT4, MXFP4, Stored, block_fp8, int4, mxfp4, quantize

WHOLE_BLOCKS = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64}
"""transformers divides the rows by the number of factors: only whole blocks get their own factors there."""
LATENT = {"q_lora_rank": 128, "kv_lora_rank": 64, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3": WHOLE_BLOCKS,
    "qwen3-moe": {**WHOLE_BLOCKS, "moe_intermediate_size": 128},
    "deepseek-v3": {**WHOLE_BLOCKS, **LATENT, "head_dim": None, "moe_intermediate_size": 128},
    "gpt-oss": {},
}

Quantize = Callable[[str, Tensor], Stored]


def _release(family: str, directory: Path, config: dict[str, Any], stored: Quantize) -> str:
    return quantize(make_family(family, directory, **SHAPES[family]), directory / "release", config, stored)


def _tensors(model: Any) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


CASES = [
    ("qwen3", FP8, block_fp8(), FineGrainedFP8Config),
    ("deepseek-v3", FP8, block_fp8(torch.bfloat16), FineGrainedFP8Config),
    ("qwen3-moe", FP8, block_fp8(), FineGrainedFP8Config),
    ("gpt-oss", MXFP4, mxfp4, Mxfp4Config),
    ("qwen3", INT4, int4(), CompressedTensorsConfig),
    ("deepseek-v3", INT4, int4(torch.float32), CompressedTensorsConfig),
]
IDS = [f"{family}-{config['quant_method']}" for family, config, _, _ in CASES]


@pytest.mark.parametrize(("family", "config", "stored", "theirs"), CASES, ids=IDS)
@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # the import of compressed-tensors
def test_weights_are_those_that_the_formats_own_library_reads(
    tmp_path: Path, family: str, config: dict[str, Any], stored: Quantize, theirs: Any
) -> None:
    path = _release(family, tmp_path, config, stored)
    model = load_model(path, torch.float32)
    read: Any = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, quantization_config=theirs(dequantize=True)
    )
    expected = _tensors(read)
    for name, tensor in _tensors(model).items():
        assert tensor.dtype == torch.float32, name
        assert torch.equal(tensor, expected[name].float()), name
    assert not hasattr(model.config, "quantization_config")
    assert "quant" not in json.dumps(model.config.to_dict(), default=str)
    assert not any(key.startswith(("hf_quant", "is_quant", "quant")) for key in vars(model))
    again: PreTrainedModel = load_model(path, torch.bfloat16)
    for name, parameter in again.named_parameters():
        if "e_score_correction" not in name:
            assert parameter.dtype == torch.bfloat16, name
            assert torch.equal(parameter, expected[name].float().bfloat16()), f"{name} is rounded once"


def test_kimi_k2_is_a_deepseek_v3(tmp_path: Path) -> None:
    path = Path(_release("deepseek-v3", tmp_path, INT4, int4()))
    expected = _tensors(load_model(str(path), torch.float32))
    described = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(described | {"model_type": "kimi_k2"}))
    assert_same(_tensors(load_model(str(path), torch.float32)), expected)


def test_the_last_block_of_a_dimension_may_be_cut(tmp_path: Path) -> None:
    """DeepSeek's kv_a_proj_with_mqa has 576 rows. transformers refuses it; it reads 192 rows as two blocks of 96."""
    path = quantize(make_family("qwen3", tmp_path, hidden_size=192), tmp_path / "release", FP8, block_fp8())
    parts = {k: v for file in weight_files(path) for k, v in load_file(file).items()}
    name = "model.layers.0.self_attn.o_proj.weight"
    weight, grid = parts[name].float(), parts[f"{name}_scale_inv"]
    assert weight.shape == (192, 128)
    assert grid.shape == (2, 1)
    expected = torch.cat([weight[:BLOCK] * grid[0], weight[BLOCK:] * grid[1]])
    assert torch.equal(load_model(path, torch.float32).model.layers[0].self_attn.o_proj.weight, expected)


@pytest.mark.parametrize("case", [1, 3, 4], ids=["fp8", "mxfp4", "int4"])
def test_rows_and_parts_are_those_of_the_whole_weight(
    tmp_path: Path, case: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, config, stored, _ = CASES[case]
    path = _release(family, tmp_path, config, stored)
    with StoredWeights(path, weight_files(path), read_config(path).format, torch.float32) as opened:
        whole = {name: opened.get_slice(name)[:] for name in opened.keys()}  # noqa: SIM118
        monkeypatch.setattr(format, "PART", 700)
        for name, tensor in whole.items():
            part = opened.get_slice(name)
            assert list(tensor.shape) == part.get_shape()
            rows = len(tensor)
            for start, stop in ((0, rows), (rows // 3, 2 * rows // 3), (rows - 1, rows)):
                assert torch.equal(part[start:stop], tensor[start:stop]), name


def test_fused_experts_have_factors_for_blocks_of_each_expert(tmp_path: Path) -> None:
    """The weights of one tensor for all experts, as transformers writes FP8."""
    numbers = torch.randn(3, 200, 300).to(torch.float8_e4m3fn)
    grid = torch.rand(3, 2, 3)
    wide = grid.repeat_interleave(BLOCK, 1)[:, :200].repeat_interleave(BLOCK, 2)[..., :300]
    form = format.BlockFp8(BLOCK, BLOCK)
    parts = [_Slice(numbers), _Slice(grid)]
    assert form.shape(parts) == [3, 200, 300]
    assert torch.equal(form.read(parts, range(3), torch.float32), numbers.float() * wide)
    assert torch.equal(form.read(parts, range(1, 2), torch.float32), (numbers.float() * wide)[1:2])


class _Slice:
    """A tensor with the methods of safetensors' slices."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def __getitem__(self, rows: slice) -> Tensor:
        return self._tensor[rows]


@pytest.mark.parametrize("case", [0, pytest.param(3, marks=pytest.mark.slow), 5], ids=[IDS[n] for n in (0, 3, 5)])
def test_ranks_read_their_rows_of_a_release(tmp_path: Path, case: int) -> None:
    """Rows of a rank begin inside of a block: 3 ranks divide 256 rows."""
    family, config, stored, _ = CASES[case]
    release = _release(family, tmp_path, config, stored)
    load_model(release, torch.float32).save_pretrained(tmp_path / "same")
    found = []
    for path in (release, str(tmp_path / "same")):
        backend = make_ranks(3, path=path)
        backend.create_model("m", spec(4, 1))
        found.append(ok(backend.run([train("m", sft(0, 12, 30, 9))]))[0].metrics)
        backend.close()
    assert found[0] == found[1]


def test_full_finetuning_saves_plain_weights_that_say_so(tmp_path: Path) -> None:
    release = _release("qwen3", tmp_path, INT4, int4())
    settings = {"base_model": release, "backend_config": {"trainer.full_finetuning": True}}
    backend = create_backend(load_config(settings))
    backend.create_model("m", WHOLE)
    (tmp_path / "saved").mkdir()
    backend.save_adapter("m", tmp_path / "saved")
    assert "quant" not in (tmp_path / "saved" / "config.json").read_text()
    read: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    expected = _tensors(load_model(release, torch.float32))
    assert_same(_tensors(read), expected)


def _int4(**weights: Any) -> dict[str, Any]:
    changed = copy.deepcopy(INT4)
    changed["config_groups"]["group_0"]["weights"] |= weights
    return changed


_WEIGHTS = r"config_groups\.group_0\.weights\."


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"quant_method": "awq", "bits": 4}, "quant_method is 'awq', and the trainer reads fp8, mxfp4 and compressed-"),
        ({"quant_method": "gptq", "bits": 4}, "quant_method is 'gptq'"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quant_method is 'bitsandbytes'"),
        ({"bits": 4}, "quant_method is None"),
        (
            {"quant_method": "fp8", "activation_scheme": "static"},
            "weight_block_size is None, and the trainer reads FP8",
        ),
        (FP8 | {"fmt": "e5m2"}, "fmt is 'e5m2', and the trainer reads 'e4m3'"),
        (FP8 | {"activation_scheme": "static"}, "activation_scheme is 'static'"),
        (MXFP4, "quant_method is mxfp4, which is known of gpt_oss alone, and not of qwen3"),
        (INT4 | {"format": "nvfp4-pack-quantized"}, "format is 'nvfp4-pack-quantized'"),
        (
            INT4 | {"kv_cache_scheme": {"num_bits": 8}},
            r"kv_cache_scheme is \{'num_bits': 8\}, and the trainer reads none",
        ),
        (INT4 | {"config_groups": {}}, "config_groups is empty"),
        (_int4(num_bits=3), _WEIGHTS + "num_bits is 3, and the trainer reads 4 or 8"),
        (_int4(symmetric=False), _WEIGHTS + "symmetric is False"),
        (_int4(actorder="group"), _WEIGHTS + "actorder is 'group'"),
        (_int4(type="float"), _WEIGHTS + "type is 'float'"),
        (_int4(strategy="block"), _WEIGHTS + "strategy is 'block'"),
        (_int4(group_size=None), _WEIGHTS + "group_size is None"),
    ],
    ids=lambda value: None if isinstance(value, str) else "",
)
def test_other_formats_are_refused_by_their_field(tmp_path: Path, config: dict[str, Any], said: str) -> None:
    description = {**json.loads((Path(make_family("qwen3", tmp_path)) / "config.json").read_text())}
    path = tmp_path / "qwen3"
    (path / "config.json").write_text(json.dumps(description | {"quantization_config": config}))
    (path / "model.safetensors").unlink()  # the refusal needs no weights
    with pytest.raises(ConfigError, match=f"^base_model: cannot load {path}: config.json's quantization_config.{said}"):
        load_model(str(path), torch.float32)
    nested = {"model_type": "qwen3_5", "text_config": {"model_type": "qwen3_5_text", "quantization_config": config}}
    (path / "config.json").write_text(json.dumps(nested))
    with pytest.raises(ConfigError, match=f": config.json's text_config.quantization_config.{said.split(' alone')[0]}"):
        load_model(str(path), torch.float32)


def test_an_order_of_calibration_that_stores_nothing_is_read() -> None:
    for order in ("weight", "static", None):
        assert format.format_of(_int4(actorder=order), "qwen3") == format.PackedInt((GROUP,))


def test_files_that_are_quantized_in_another_way_than_config_json_says_are_refused(tmp_path: Path) -> None:
    q = "model.layers.0.mlp.down_proj.weight"

    def changed(change: Callable[[Stored], None], config: dict[str, Any], stored: Quantize) -> str:
        out = tmp_path / f"release{len(list(tmp_path.iterdir()))}"

        def one(name: str, weight: Tensor) -> Stored:
            made = stored(name, weight)
            if name == q:
                change(made)
            return made

        return quantize(plain, out, config, one)

    plain = make_family("qwen3", tmp_path)
    s = q.removesuffix(".weight")
    cases: list[tuple[Callable[[Stored], Any], dict[str, Any], Quantize, str]] = [
        (
            lambda t: t.pop(f"{q}_scale_inv"),
            FP8,
            block_fp8(),
            f"hold {q} as F8_E4M3, and config.json describes another",
        ),
        (lambda t: t.pop(q), FP8, block_fp8(), f"the files lack {q}, which belongs to {q}"),
        (
            lambda t: t.update({f"{q}_scale_inv": torch.ones(2, 2)}),
            FP8,
            block_fp8(),
            r"have factors \[1, 1\], not \[2, 2",
        ),
        (lambda t: t.update({q: t[q].float()}), FP8, block_fp8(), f"hold {q} as F32, and the trainer reads F8_E4M3"),
        (lambda t: t.pop(f"{s}.weight_shape"), INT4, int4(), f"the files lack {s}.weight_shape, which belongs to {q}"),
        (lambda t: t.update({f"{s}.weight_scale": torch.ones(64, 1)}), INT4, int4(), f"{q}: packed numbers"),
        (
            lambda t: t.update({f"{s}.weight_zero_point": torch.zeros(8, 3).int()}),
            INT4,
            int4(),
            "zero_point as I32, and",
        ),
        (
            lambda t: None,
            INT4,
            block_fp8(),
            "as F8_E4M3, and config.json describes another format in quantization_config",
        ),
    ]
    for change, config, stored, said in cases:
        with pytest.raises(ConfigError, match=said):
            load_model(changed(change, config, stored), torch.float32)
    path = Path(changed(lambda t: None, FP8, block_fp8()))
    description = json.loads((path / "config.json").read_text())
    del description["quantization_config"]
    (path / "config.json").write_text(json.dumps(description))
    with pytest.raises(ConfigError, match="as F8_E4M3, and config.json has no quantization_config"):
        load_model(str(path), torch.float32)
    assert GROUP < 64, "down_proj has 96 columns: one factor for all of them would be another strategy"
