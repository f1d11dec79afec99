"""A directory that does not hold a whole model is refused with one sentence that names the file and the field,
before weights are read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from skyrl.base.config.server import ConfigError
from skyrl.trainer.model import loading
from skyrl.trainer.model.loading import load_model
from tests.families import make_family
from tests.quantized import write_shards

EMBED, HEAD, UP = "model.embed_tokens.weight", "lm_head.weight", "model.layers.1.mlp.up_proj.weight"
INDEX = "model.safetensors.index.json"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def _config(**changed: Any) -> Callable[[Path], None]:
    """Change fields of config.json; remove those that become None."""

    def change(path: Path) -> None:
        file = path / "config.json"
        described = json.loads(file.read_text()) | changed
        file.write_text(json.dumps({name: value for name, value in described.items() if value is not None}))

    return change


def _tensors(change: Callable[[dict[str, Tensor]], Any]) -> Callable[[Path], None]:
    def changed(path: Path) -> None:
        tensors = {name: tensor for file in (FIRST, SECOND) for name, tensor in load_file(path / file).items()}
        change(tensors)
        write_shards(path, tensors)

    return changed


def _truncate(path: Path) -> None:
    file = path / SECOND
    file.write_bytes(file.read_bytes()[:-8])


def _both(*changes: Callable[[Path], Any]) -> Callable[[Path], None]:
    return lambda path: [change(path) for change in changes][0]


CASES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing shard": (lambda path: (path / SECOND).unlink(), f"{SECOND} of the weight_map of {INDEX} is missing"),
    "truncated shard": (
        _truncate,
        f"{SECOND} is damaged: Error while deserializing header: incomplete metadata, file ",
    ),
    "empty shard": (lambda path: (path / FIRST).write_bytes(b""), f"{FIRST} is damaged: "),
    "index without its field": (
        lambda path: (path / INDEX).write_text("{}"),
        f"{INDEX} has no weight_map: 'weight_map'",
    ),
    "cut config": (lambda path: (path / "config.json").write_text('{"model_type": '), "config.json is no JSON: Expect"),
    "a list as config": (lambda path: (path / "config.json").write_text("[]"), "config.json is no JSON object"),
    "no model_type": (_config(model_type=None), "config.json lacks model_type"),
    "newer model_type": (
        _config(model_type="lfm3"),
        f"config.json's model_type is 'lfm3', which transformers {transformers.__version__} does not know, and "
        "transformers 5.24 does",
    ),
    "unknown model_type": (_config(model_type="qwen9"), "config.json's model_type is 'qwen9', which transformers 5"),
    "no language model": (
        _config(model_type="vit", hidden_act="gelu"),
        "config.json's model_type is 'vit', and transformers has no language model of it",
    ),
    "no size": (_config(hidden_size=None), "config.json lacks hidden_size"),
    "no layers": (_config(num_hidden_layers=None), "config.json lacks num_hidden_layers"),
    "no activation": (_config(hidden_act=None), "config.json lacks hidden_act"),
    "no epsilon": (_config(rms_norm_eps=None), "config.json lacks rms_norm_eps"),
    "unknown activation": (
        _config(hidden_act="swoosh"),
        "config.json's hidden_act is 'swoosh', which is no activation",
    ),
    "a word for a number": (
        _config(hidden_size="many"),
        "config.json describes no qwen3 model: Validation error for field 'hidden_size': ",
    ),
    "fewer layers": (
        _config(num_hidden_layers=1, layer_types=None),
        "the files hold model.layers.1.input_layernorm.weight and 10 others, which the model of config.json does not",
    ),
    "another width": (
        _config(intermediate_size=48),
        "the files hold model.layers.0.mlp.down_proj.weight with shape [64, 96], and config.json makes it [64, 48]",
    ),
    "a weight is missing": (
        _tensors(lambda tensors: tensors.pop(UP)),
        f"the files lack {UP}, which the model of config.json has",
    ),
    "a bias that is not used": (
        _tensors(lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(128)})),
        "the files hold model.layers.0.self_attn.q_proj.bias, which the model of config.json does not have",
    ),
    "not tied, and no head": (
        _tensors(lambda tensors: tensors.pop(HEAD)),
        f"config.json's tie_word_embeddings is false, and the files lack {HEAD}",
    ),
    "tied, and another head": (
        _config(tie_word_embeddings=True),
        f"config.json's tie_word_embeddings is true, and the files hold another tensor as {HEAD} than as {EMBED}",
    ),
    "tied, and neither": (
        _both(_config(tie_word_embeddings=True), _tensors(lambda tensors: (tensors.pop(HEAD), tensors.pop(EMBED)))),
        f"the files lack {HEAD} and 1 others, which the model of config.json has",
    ),
}


@pytest.fixture
def _no_weights_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(loading, "_one_at_a_time")


@pytest.mark.usefixtures("_no_weights_are_read")
@pytest.mark.parametrize("name", CASES)
def test_a_bad_directory_is_refused_with_a_sentence(tmp_path: Path, name: str) -> None:
    change, said = CASES[name]
    path = Path(make_family("qwen3", tmp_path))
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    write_shards(path, tensors)
    change(path)
    with pytest.raises(ConfigError) as refused:
        load_model(str(path), torch.float32)
    assert str(refused.value).startswith(f"base_model: cannot load {path}: {said}")
    assert "\n" not in str(refused.value)


@pytest.mark.usefixtures("_no_weights_are_read")
@pytest.mark.parametrize(
    ("family", "changed", "said"),
    [
        ("qwen3_moe", {"num_experts_per_tok": None}, "config.json lacks num_experts_per_tok"),
        ("gpt_oss", {"num_local_experts": None}, "config.json lacks num_local_experts"),
        (
            "deepseek_v3",
            {"scoring_func": "softmax"},
            "config.json's scoring_func is 'softmax', and the router is known",
        ),
        ("kimi_k2", {"topk_method": "greedy"}, "config.json's topk_method is 'greedy', and the router is known with"),
        ("minimax_m2", {"scoring_func": "softmax"}, "config.json's scoring_func is 'softmax'"),
    ],
)
def test_a_mixture_with_a_router_that_is_not_known_is_refused(
    tmp_path: Path, family: str, changed: dict[str, Any], said: str
) -> None:
    path = Path(make_family("gpt-oss", tmp_path))
    counts = {"num_experts": 4, "n_routed_experts": 4, "moe_intermediate_size": 48}
    _config(model_type=family, **({} if family == "gpt_oss" else counts) | changed)(path)
    with pytest.raises(ConfigError) as refused:
        load_model(str(path), torch.float32)
    assert str(refused.value).startswith(f"base_model: cannot load {path}: {said}")


def test_another_head_is_found_where_the_files_have_other_names(tmp_path: Path) -> None:
    """transformers also reads files without the prefix of the model."""
    path = Path(make_family("qwen3", tmp_path, tie_word_embeddings=True))
    tensors = {name.removeprefix("model."): tensor for name, tensor in load_file(path / "model.safetensors").items()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    load_model(str(path), torch.float32)
    other = {HEAD: tensors["embed_tokens.weight"] + 1}
    save_file(tensors | other, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=f"tie_word_embeddings is true, and the files hold another tensor as {HEAD}"):
        load_model(str(path), torch.float32)


def test_equal_tied_tensors_and_tensors_that_no_model_uses_are_read(tmp_path: Path) -> None:
    path = Path(make_family("qwen3", tmp_path, tie_word_embeddings=True))
    tensors = load_file(path / "model.safetensors")
    further = ("mtp.fc.weight", "model.layers.2.eh_proj.weight", "model.layers.2.mlp.up_proj.weight")
    more = {HEAD: tensors[EMBED].clone(), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(16)}
    more |= {name: torch.ones(2) for name in further}
    save_file(tensors | more, path / "model.safetensors", metadata={"format": "pt"})
    model = load_model(str(path), torch.float32)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    del more[further[1]]
    save_file(tensors | more, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=f"the files hold {further[2]}, which the model of config.json does not have"):
        load_model(str(path), torch.float32)
