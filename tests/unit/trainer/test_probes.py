"""Random adapters for the comparison with the sampler, made by the backends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch_lora_support import VOCAB, base_path, make_backend, ok, sft, spec

from skyrl.base.adapter_files import kinds_of
from skyrl.base.config.loading import load_config
from skyrl.engine.trainer_probes import TrainerProbes, median_size, probe_tokens
from skyrl.storage.checkpoint_store.registry import open_store
from skyrl.storage.checkpoint_store.versions import version_directory
from skyrl.trainer.protocol import Backend, TrainingPass

ATTENTION = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
MLP = ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
EXPERTS = [f"mlp.experts.{each.rpartition('.')[2]}" for each in MLP]


@pytest.fixture(scope="module")
def mixture() -> Iterator[Any]:
    backend = make_backend("mixture-with-dense-layer")
    yield backend
    backend.close()


def logprobs(backend: Backend, model_id: str) -> np.ndarray:
    (result,) = ok(backend.run([TrainingPass(model_id, sft(5, 24), "cross_entropy", backward=False)]))
    return result.logprobs[0]


def test_experts_are_another_kind_than_the_mlp_of_a_dense_layer(mixture: Backend) -> None:
    kinds = kinds_of(mixture.layers_of(spec()))
    assert sorted(kinds) == sorted([*ATTENTION, *MLP, *EXPERTS, "lm_head"])
    assert kinds_of(mixture.layers_of(spec(train_attn=False, train_mlp=False))) == ["lm_head"]


def test_a_probe_differs_from_the_base_model_on_its_kinds_alone(mixture: Backend, tmp_path: Path) -> None:
    mixture.create_model("m", spec(2))
    mixture.create_probe("none", spec(2))
    assert np.array_equal(logprobs(mixture, "none"), logprobs(mixture, "m"))
    for number, kind in enumerate(kinds_of(mixture.layers_of(spec(2)))):
        name, directory = f"probe-{number}", tmp_path / str(number)
        mixture.create_probe(name, spec(2), [kind], 0.05)
        directory.mkdir()
        mixture.save_adapter(name, directory)
        saved = load_file(directory / "adapter_model.safetensors")
        changed = {key for key, tensor in saved.items() if ".lora_B." in key and tensor.any()}
        leaf = kind.rpartition(".")[2]
        assert changed
        assert all(f".{leaf}." in key and (".experts." in key) == (".experts." in kind) for key in changed)
        assert len(saved) == len(load_file(tmp_path / "0" / "adapter_model.safetensors")), "as any adapter is saved"
        assert not np.array_equal(logprobs(mixture, name), logprobs(mixture, "m")), kind
        mixture.delete_model(name)
    mixture.delete_model("none")
    mixture.delete_model("m")


def test_another_size_gives_a_multiple_of_the_same_update(mixture: Backend, tmp_path: Path) -> None:
    for name, of_update in (("one", 0.05), ("four", 0.2)):
        (tmp_path / name).mkdir()
        mixture.create_probe(name, spec(2), EXPERTS, of_update)
        mixture.save_adapter(name, tmp_path / name)
        mixture.delete_model(name)
    one, four = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("one", "four"))
    for key, tensor in one.items():
        torch.testing.assert_close(four[key], tensor * (4 if ".lora_B." in key else 1))


def test_every_choice_of_layers_changes_the_trainers_logprobs_far_above_rounding(tmp_path: Path) -> None:
    flags = {"state_dir": tmp_path, "base_model": base_path("mixture-with-dense-layer")}
    config = load_config(flags | {"adapter_dtype": "bfloat16"})
    backend = make_backend("mixture-with-dense-layer")
    probes = TrainerProbes(config, backend, open_store(config))
    expected = probes.run()
    assert [each.layers for each in expected.probes] == [*ATTENTION, *MLP, *EXPERTS, "lm_head", "all layers"]
    for each in expected.probes:
        assert 0.2 < median_size(each.logprobs - expected.base) < 3, each.layers
        saved = load_file(version_directory(tmp_path, each.adapter) / "adapter_model.safetensors")
        assert {tensor.dtype for tensor in saved.values()} == {torch.bfloat16}
    probes.remove()
    assert not [*(tmp_path / "adapters").iterdir()]


def test_the_tokens_of_the_probe_fit_into_any_context() -> None:
    assert len(probe_tokens(VOCAB, 16)) == 15
    tokens = probe_tokens(151_936, 40_960)
    assert len(tokens) == 64
    assert tokens.min() >= 151_936 // 8
    assert tokens.max() < 151_936 // 2
    assert np.array_equal(tokens, probe_tokens(151_936, 40_960)), "the same at each start"
