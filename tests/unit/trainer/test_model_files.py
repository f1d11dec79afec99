"""The files of a whole model against those of its base model: what was trained is new, all else is as it was."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch_lora_support import base_path, make_full, ok, sft, train
from trainer_kinds import WHOLE

from skyrl.base.config.server import ConfigError
from skyrl.trainer.protocol import AdamParams
from skyrl.trainer.ranks.full_backend import FullBackend
from tests.families import make_family
from tests.local_ranks import rank_of

OTHERS = {
    "mtp.layers.0.norm.weight": torch.arange(5, dtype=torch.bfloat16),
    "mtp.layers.0.bias": torch.tensor(1.5, dtype=torch.float64),
    "mtp.layers.0.ids": torch.arange(3),
    "mtp.layers.0.mask": torch.tensor([True, False]),
    "mtp.layers.0.half": torch.arange(7, dtype=torch.float16),
}
"""Of layers that predict further tokens, in every dtype that a file may have beside float32."""


def _trained(path: Path) -> FullBackend:
    backend = make_full(path=str(path))
    assert isinstance(backend, FullBackend)
    backend.create_model("m", WHOLE)
    ok(backend.run([train("m", sft(1, 12, 7))]))
    backend.optim_step("m", AdamParams(learning_rate=1e-2))
    return backend


def _tensors(directory: Path) -> dict[str, Tensor]:
    return {name: one for file in directory.glob("model*.safetensors") for name, one in load_file(file).items()}


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that sees, with a file of its processor, and with layers that predict further tokens."""
    path = Path(make_family("qwen3.5 that sees", tmp_path_factory.mktemp("base")))
    save_file(load_file(path / "model.safetensors") | OTHERS, path / "model.safetensors", metadata={"format": "pt"})
    (path / "preprocessor_config.json").write_text('{"patch_size": 16}')
    return path


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_vision_tower_and_further_layers_are_copied_as_they_are(tmp_path: Path, seeing: Path, dtype: str) -> None:
    backend, saved = _trained(seeing), tmp_path / "saved"
    saved.mkdir()
    backend.save_adapter("m", saved, dtype=dtype)  # pyright: ignore[reportArgumentType]
    before, after = _tensors(seeing), _tensors(saved)
    assert after.keys() == before.keys()
    trained = rank_of(backend).parameters("m").weights
    for name, tensor in before.items():
        if name in trained:
            assert torch.equal(after[name], trained[name].to(getattr(torch, dtype))), name
            assert not torch.equal(after[name].float(), tensor), name
        else:
            assert after[name].dtype == tensor.dtype, name
            assert torch.equal(after[name], tensor), name
    assert {name.split(".")[0] for name in before.keys() - trained.keys()} == {"mtp", "model"}
    assert (saved / "preprocessor_config.json").read_bytes() == (seeing / "preprocessor_config.json").read_bytes()
    described = json.loads((saved / "config.json").read_text())
    assert described["vision_config"] == json.loads((seeing / "config.json").read_text())["vision_config"]
    assert described["dtype"] == described["text_config"]["dtype"] == dtype


def test_a_state_of_a_model_that_sees_continues_to_the_last_bit_in_many_files(tmp_path: Path, seeing: Path) -> None:
    first, again = _trained(seeing), make_full(path=str(seeing))
    for name in ("parts", "again"):
        (tmp_path / name).mkdir()
    first._state.save_state("m", tmp_path / "parts", 20_000)
    index = json.loads((tmp_path / "parts" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == _tensors(seeing).keys()
    assert len(set(index["weight_map"].values())) > 4
    again.create_model("m", WHOLE)
    again.load_state("m", tmp_path / "parts", optimizer=True)
    again.save_state("m", tmp_path / "again")
    found, expected = _tensors(tmp_path / "again"), _tensors(tmp_path / "parts")
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


def test_tied_embeddings_that_the_files_hold_twice_are_written_twice(tmp_path: Path) -> None:
    base, saved = tmp_path / "base", tmp_path / "saved"
    shutil.copytree(base_path("qwen3-tied"), base)
    tensors = load_file(base / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    save_file(tensors | {"lm_head.weight": embedding.clone()}, base / "model.safetensors", metadata={"format": "pt"})
    backend = _trained(base)
    saved.mkdir()
    backend.save_adapter("m", saved)
    after = _tensors(saved)
    assert torch.equal(after["lm_head.weight"], after["model.embed_tokens.weight"])
    assert not torch.equal(after["lm_head.weight"], embedding)
    backend.save_state("m", saved)
    once = {name: one for name, one in load_file(saved / "model.safetensors").items() if name != "lm_head.weight"}
    save_file(once, saved / "model.safetensors")
    backend.load_state("m", saved, optimizer=True)  # as versions before 0.2.0 have written it


def test_a_checkpoint_without_what_is_only_copied_is_read_and_one_with_more_layers_is_not(
    tmp_path: Path, seeing: Path
) -> None:
    backend, saved = _trained(seeing), tmp_path / "saved"
    saved.mkdir()
    backend.save_state("m", saved)
    tensors = load_file(saved / "model.safetensors")
    save_file({name: one for name, one in tensors.items() if name not in OTHERS}, saved / "model.safetensors")
    backend.load_state("m", saved, optimizer=True)
    save_file(tensors | {"model.language_model.layers.9.norm.weight": torch.zeros(3)}, saved / "model.safetensors")
    with pytest.raises(ValueError, match=r"layers\.9\.norm"):
        backend.load_state("m", saved, optimizer=True)


def test_experts_with_rows_and_columns_exchanged_are_refused_by_name(tmp_path: Path) -> None:
    """So are those of the released mixtures of Qwen3-VL."""
    path = Path(make_family("qwen3-vl-moe", tmp_path))
    tensors = load_file(path / "model.safetensors")
    experts = {name: one.transpose(1, 2).contiguous() for name, one in tensors.items() if ".experts." in name}
    save_file(tensors | experts, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"experts\.\S+ with rows and columns exchanged"):
        make_full(path=str(path))
