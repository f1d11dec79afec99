"""Reading a release's files by rows, against what transformers loads from them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, Qwen3VLMoeForConditionalGeneration

from skyrl.trainer.files.model_files import stored_parameters
from skyrl.trainer.model.loading import detach_vision, model_class
from tests.families import MIXTURES, make_family


@contextmanager
def _opened(directory: Path) -> Iterator[Mapping[str, Any]]:
    with safe_open(directory / "model.safetensors", framework="pt") as reader:
        yield dict.fromkeys(reader.keys(), reader)


def _read(model: Any, directory: Path) -> dict[str, Tensor]:
    """The parameters in two parts of their rows, as two ranks read them."""
    expected = model.state_dict()
    with _opened(directory) as stored:
        found = stored_parameters(model, {name: one.shape for name, one in expected.items()}, stored)
        for name, rows in found.items():
            assert rows.get_shape() == list(expected[name].shape)
        return {name: torch.cat([rows[0:1], rows[1 : rows.get_shape()[0]]]) for name, rows in found.items()}


def _assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("family", MIXTURES)
def test_the_rows_of_a_familys_files_are_those_that_transformers_loads(tmp_path: Path, family: str) -> None:
    path = Path(make_family(family, tmp_path))
    model = model_class(AutoConfig.from_pretrained(path)).from_pretrained(path)
    detach_vision(model)
    _assert_equal(_read(model, path), model.state_dict())


def test_transposed_experts_are_turned_back(tmp_path: Path) -> None:
    """Releases of Qwen3-VL have columns before rows."""
    path = Path(make_family("qwen3-vl-moe", tmp_path))
    model = Qwen3VLMoeForConditionalGeneration.from_pretrained(path)
    tensors = load_file(path / "model.safetensors")
    for name in [name for name in tensors if ".experts." in name]:
        tensors[name] = tensors[name].transpose(1, 2).contiguous()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    again = Qwen3VLMoeForConditionalGeneration.from_pretrained(path)
    _assert_equal(again.state_dict(), model.state_dict())
    _assert_equal(_read(model, path), model.state_dict())
    shapes = {name: one.shape for name, one in model.state_dict().items()}
    with _opened(path) as stored:
        found = stored_parameters(model, shapes, stored)
    with pytest.raises(ValueError, match=r"experts\.\S+ with rows and columns exchanged"):  # ranks do not write them
        _ = found["model.language_model.layers.0.mlp.experts.gate_up_proj"].tensors


def test_the_tensors_that_make_a_parameter_follow_each_other(tmp_path: Path) -> None:
    path = Path(make_family("mixtral", tmp_path))
    model = model_class(AutoConfig.from_pretrained(path)).from_pretrained(path)
    expected = model.state_dict()
    with _opened(path) as stored:
        found = stored_parameters(model, {name: one.shape for name, one in expected.items()}, stored)
        flat = {
            name: torch.cat([stored[one].get_tensor(one).flatten() for one in rows.tensors])
            for name, rows in found.items()
        }
    _assert_equal(flat, {name: one.flatten() for name, one in expected.items()})


@pytest.mark.parametrize("leaf", ["w1", "w3", "w2"])
def test_experts_of_which_one_is_lacking_are_not_found(tmp_path: Path, leaf: str) -> None:
    path = Path(make_family("mixtral", tmp_path))
    model = model_class(AutoConfig.from_pretrained(path)).from_pretrained(path)
    tensors = load_file(path / "model.safetensors")
    del tensors[f"model.layers.1.block_sparse_moe.experts.2.{leaf}.weight"]
    save_file(tensors, path / "model.safetensors")
    shapes = {name: one.shape for name, one in model.state_dict().items()}
    with _opened(path) as stored:
        found = stored_parameters(model, shapes, stored)
    name = f"model.layers.1.mlp.experts.{'down_proj' if leaf == 'w2' else 'gate_up_proj'}"
    assert name not in found or found[name].get_shape() != list(shapes[name])
