"""The check of adapters that come from outside, on files that the trainer has written and on damaged ones; and loads of
them."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch_lora_support import make_backend, ok, sft, spec

from skyrl.base.adapter_files import (
    PEFT_JSON,
    PEFT_TENSORS,
    DoesNotFit,
    Target,
    check_adapter,
    decode_targets,
    encode_targets,
    file_shapes,
    most_bytes,
)
from skyrl.trainer.lora.adapter import Adapter
from skyrl.trainer.lora.files import save_adapter
from skyrl.trainer.protocol import AdamParams, Backend, InvalidRequest, TrainingPass

SPEC = spec(2, train_unembed=False)
Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.fixture(scope="module")
def backend() -> Iterator[Backend]:
    backend = make_backend("qwen3")
    yield backend
    backend.close()


@pytest.fixture(scope="module")
def trained(backend: Backend, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of an adapter whose matrices are all different from zero."""
    backend.create_model("trained", SPEC)
    for _ in range(2):
        ok(backend.run([TrainingPass("trained", sft(3, 9), "cross_entropy")]))
        backend.optim_step("trained", AdamParams(learning_rate=0.01))
    directory = tmp_path_factory.mktemp("trained")
    backend.save_adapter("trained", directory)
    return directory


@pytest.fixture
def files(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "adapter"))


@pytest.mark.parametrize(
    "experts",
    [[], ["mlp.experts.gate_proj", "mlp.experts.down_proj"], ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]],
    ids=["dense", "experts", "fused experts"],
)
def test_what_the_trainer_saves_has_the_expected_names_and_shapes(experts: list[str], tmp_path: Path) -> None:
    targets = [Target("model.layers.0.self_attn.q_proj", 6, 8), Target("lm_head", 6, 11)]
    targets += [Target(f"model.layers.0.{name}", 6, 10, experts=3) for name in experts]
    adapter = Adapter(SPEC, targets, torch.device("cpu"))
    save_adapter(adapter, "base", tmp_path)
    stored = load_file(tmp_path / PEFT_TENSORS)
    assert {name: tuple(each.shape) for name, each in stored.items()} == file_shapes(targets, SPEC.rank)
    assert check_adapter(tmp_path, targets, SPEC.rank).alpha == SPEC.alpha
    assert (tmp_path / PEFT_TENSORS).stat().st_size <= most_bytes(file_shapes(targets, SPEC.rank))


def test_layers_of_all_train_flags_survive_the_database(backend: Backend) -> None:
    flags = {flag: spec(1, **{each: each == flag for each in FLAGS}) for flag in FLAGS}
    text = encode_targets({flag: backend.layers_of(each) for flag, each in flags.items()})
    for each in (SPEC, spec(2), spec(2, train_attn=False), spec(2, train_mlp=False, train_unembed=False)):
        assert set(decode_targets(text, each)) == set(backend.layers_of(each))


FLAGS = ("train_attn", "train_mlp", "train_unembed")


def test_an_adapter_of_this_base_model_fits_in_every_dtype(backend: Backend, files: Path) -> None:
    tensors = load_file(files / PEFT_TENSORS)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        save_file({name: each.to(dtype) for name, each in tensors.items()}, files / PEFT_TENSORS)
        assert check_adapter(files, backend.layers_of(SPEC), 2).rank == 2


def _tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def damage(files: Path) -> None:
        tensors = load_file(files / PEFT_TENSORS)
        change(tensors)
        save_file(tensors, files / PEFT_TENSORS)

    return damage


def _renamed(tensors: dict[str, torch.Tensor]) -> None:
    for name in list(tensors):
        tensors[name.replace("model.layers", "model.language_model.layers")] = tensors.pop(name)


def _config(**changes: Any) -> Callable[[Path], None]:
    def damage(files: Path) -> None:
        file = files / PEFT_JSON
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return damage


def _bytes(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def damage(files: Path) -> None:
        file = files / PEFT_TENSORS
        file.write_bytes(change(file.read_bytes()))

    return damage


DAMAGED: dict[str, tuple[Callable[[Path], None], str]] = {
    "names of the class that sees": (_tensors(_renamed), r"language_model.layers.0.*has no layer.*rename the tensors"),
    "another layer": (_tensors(lambda t: t.update({Q.replace("q_proj", "x_proj"): torch.ones(2, 48)})), "x_proj.*no"),
    "a layer is missing": (_tensors(lambda t: t.pop(Q)), "lacks .*q_proj.lora_A"),
    "another rank": (_tensors(lambda t: t.update({Q: torch.ones(3, 48)})), r"q_proj.*is \[3, 48\].*must be \[2, 48\]"),
    "another size": (_tensors(lambda t: t.update({Q: torch.ones(2, 47)})), r"is \[2, 47\]"),
    "infinite": (_tensors(lambda t: t[Q].view(-1)[5:6].fill_(float("inf"))), "q_proj.lora_A.* not finite"),
    "not a number": (_tensors(lambda t: t.update({Q: t[Q].bfloat16() * float("nan")})), "not finite"),
    "whole numbers": (_tensors(lambda t: t.update({Q: t[Q].to(torch.int32)})), "is I32; allowed are F32, F16, BF16"),
    "cut off": (_bytes(lambda data: data[:-1]), "incomplete"),
    "longer": (_bytes(lambda data: data + b"x"), "incomplete"),
    "empty": (_bytes(lambda data: b""), "no safetensors file"),
    "a pickle": (_bytes(lambda data: b"\x80\x04" + data), "no safetensors file"),
    "a header that lies": (_bytes(lambda data: struct.pack("<Q", 2**40) + data[8:]), "no safetensors file"),
    "a header of lists": (_bytes(lambda data: struct.pack("<Q", 2) + b"[]"), "header cannot be read"),
    "no tensors": (lambda files: (files / PEFT_TENSORS).unlink(), "there is no adapter_model.safetensors"),
    "no config": (lambda files: (files / PEFT_JSON).unlink(), "there is no adapter_config.json"),
    "a config of garbage": (lambda files: (files / PEFT_JSON).write_text("{"), "no JSON"),  # type: ignore[dict-item]
    "another method": (_config(peft_type="LOHA"), "no LoRA adapter"),
    "DoRA": (_config(use_dora=True), "use_dora, which this server does not compute"),
    "rsLoRA": (_config(use_rslora=True), "use_rslora"),
    "ranks by layer": (_config(rank_pattern={"q_proj": 4}), "rank_pattern"),
    "other weights": (_config(modules_to_save=["embed_tokens"]), "modules_to_save"),
    "a method of tomorrow": (_config(use_novelty=True), "use_novelty"),
    "a bias": (_config(bias="all"), "bias"),
    "another start": (_config(init_lora_weights="pissa"), "init_lora_weights"),
    "the rank of another": (_config(r=4), "has r 4, and lora_config.rank is 2"),
    "a rank of zero": (_config(r=0), "whole number above 0"),
    "no modules": (_config(target_modules=None), "target_modules must name modules"),
    "no alpha": (_config(lora_alpha=None), "lora_alpha must be a number"),
    "an alpha that is no number": (_config(lora_alpha=float("nan")), "lora_alpha must be a number"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_an_adapter_that_does_not_fit_says_so(case: str, backend: Backend, files: Path) -> None:
    damage, message = DAMAGED[case]
    damage(files)
    with pytest.raises(DoesNotFit, match=message):
        check_adapter(files, backend.layers_of(SPEC), 2)


def _logprobs(backend: Backend, model_id: str) -> np.ndarray:
    (result,) = ok(backend.run([TrainingPass(model_id, sft(5, 24), "cross_entropy", backward=False)]))
    return result.logprobs[0]


def test_an_adapter_without_a_training_state_is_trained_on_as_it_was(backend: Backend, files: Path) -> None:
    backend.create_model("fresh", SPEC)
    assert not np.array_equal(_logprobs(backend, "fresh"), _logprobs(backend, "trained"))
    backend.load_state("fresh", files, optimizer=False)
    assert np.array_equal(_logprobs(backend, "fresh"), _logprobs(backend, "trained"))
    _tensors(_renamed)(files)
    with pytest.raises(InvalidRequest, match="path: .*rename the tensors"):
        backend.load_state("fresh", files, optimizer=False)
    _config(lora_alpha=SPEC.alpha + 1)(files)
    assert np.array_equal(_logprobs(backend, "fresh"), _logprobs(backend, "trained")), "a refused load changes nothing"
    backend.delete_model("fresh")
