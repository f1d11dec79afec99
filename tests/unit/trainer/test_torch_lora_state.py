"""Training continues from a saved state bit for bit. A state that does not fit is refused and changes nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch_lora_support import assert_same, make_backend, ok, rl, saved, sft, spec, train

from skyrl.base.types.weights import LoraSpec
from skyrl.trainer.protocol import AdamParams, InvalidRequest
from skyrl.trainer.ranks.lora_backend import LoraBackend
from tests.local_ranks import rank_of

STEP = AdamParams(learning_rate=1e-2, weight_decay=0.05, grad_clip_norm=2.0)


def _backend(model_spec: LoraSpec | None = None) -> LoraBackend:
    backend = make_backend()
    backend.create_model("m", model_spec or spec())
    return backend


def _forward_backward(backend: LoraBackend, step: int) -> None:
    ok(backend.run([train("m", sft(step, 9, 20)), train("m", rl(step, 14), "ppo")]))


def _train(backend: LoraBackend, steps: range) -> None:
    for step in steps:
        _forward_backward(backend, step)
        backend.optim_step("m", STEP)


def _save(backend: LoraBackend, directory: Path) -> Path:
    directory.mkdir()
    backend.save_state("m", directory)
    return directory


def test_training_from_a_saved_state_equals_the_uninterrupted_run(tmp_path: Path) -> None:
    first = _backend()
    _train(first, range(3))
    directory = _save(first, tmp_path / "checkpoint")
    _train(first, range(3, 6))
    second = _backend(spec(seed=77))
    _forward_backward(second, 9)  # loading replaces this pending gradient
    second.load_state("m", directory, optimizer=True)
    _train(second, range(3, 6))
    assert_same(saved(first, "m", tmp_path / "1"), saved(second, "m", tmp_path / "2"))


def test_a_snapshot_between_forward_backward_and_optim_step_is_exact(tmp_path: Path) -> None:
    first = _backend()
    _train(first, range(2))
    _forward_backward(first, 2)
    directory = _save(first, tmp_path / "checkpoint")
    second = _backend(spec(seed=77))
    second.load_state("m", directory, optimizer=True)
    for backend in (first, second):
        _forward_backward(backend, 3)
        backend.optim_step("m", STEP)
    assert_same(saved(first, "m", tmp_path / "1"), saved(second, "m", tmp_path / "2"))


def test_a_step_does_not_change_what_a_rank_has_exported() -> None:
    """Also where the adapter is in main memory already."""
    backend = _backend()
    _train(backend, range(1))
    _forward_backward(backend, 1)
    exported = rank_of(backend).export("m", True)
    parts = (exported.weights, exported.exp_avg, exported.exp_avg_sq, exported.gradient)
    before = [part.copy() for part in parts]
    backend.optim_step("m", STEP)
    assert all((part == copy).all() for part, copy in zip(parts, before, strict=True))


def test_loading_without_the_optimizer_restores_weights_and_resets_the_optimizer(tmp_path: Path) -> None:
    first = _backend()
    _train(first, range(2))
    _forward_backward(first, 2)
    directory = _save(first, tmp_path / "checkpoint")
    second = _backend(spec(seed=77))
    second.load_state("m", directory, optimizer=False)
    before, after = saved(first, "m", tmp_path / "b"), saved(second, "m", tmp_path / "a")
    assert_same({name: tensor for name, tensor in before.items() if name.startswith("weights.")}, after)
    assert second.optim_step("m", STEP) == {}
    first.optim_step("m", STEP)
    for backend in (first, second):
        _forward_backward(backend, 3)
    assert first.optim_step("m", STEP)["optimizer_step"] == 4
    assert second.optim_step("m", STEP)["optimizer_step"] == 1
    continued, restarted = saved(first, "m", tmp_path / "1"), saved(second, "m", tmp_path / "2")
    assert any(not continued[name].equal(restarted[name]) for name in continued if name.startswith("weights."))


@pytest.mark.parametrize("optimizer", [False, True])
def test_loading_after_steps_leaves_nothing_of_these_steps(tmp_path: Path, optimizer: bool) -> None:
    """Neither their moments nor their step count nor a gradient that waits: the model goes on as a fresh one does that
    has loaded the same."""
    source = _backend()
    _train(source, range(2))
    directory = _save(source, tmp_path / "checkpoint")
    trained, fresh = _backend(spec(seed=3)), _backend(spec(seed=4))
    _train(trained, range(5, 8))
    _forward_backward(trained, 8)
    for backend in (trained, fresh):
        backend.load_state("m", directory, optimizer=optimizer)
    assert trained.optim_step("m", STEP) == fresh.optim_step("m", STEP) == {}
    for backend in (trained, fresh):
        _train(backend, range(2, 4))
    assert_same(saved(trained, "m", tmp_path / "1"), saved(fresh, "m", tmp_path / "2"))


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (spec(rank=4), ["lora_config.rank", "8", "4"]),
        (LoraSpec(8, 16.0, 0), ["lora_config.alpha", "32.0", "16.0"]),
        (spec(train_mlp=False), ["train_mlp", "mlp."]),
        (spec(train_unembed=False), ["train_unembed", "lm_head"]),
    ],
)
def test_the_state_of_another_adapter_shape_is_refused_and_changes_nothing(
    tmp_path: Path, other: LoraSpec, words: list[str]
) -> None:
    directory = _save(_backend(), tmp_path / "checkpoint")
    backend = _backend(other)
    _train(backend, range(1))
    before = saved(backend, "m", tmp_path / "before")
    with pytest.raises(InvalidRequest) as refused:
        backend.load_state("m", directory, optimizer=True)
    for word in words:
        assert word in str(refused.value)
    assert_same(before, saved(backend, "m", tmp_path / "after"))


@pytest.mark.parametrize("damaged", ["adapter_model.safetensors", "optimizer.safetensors"])
def test_loading_damaged_or_missing_files_changes_nothing(tmp_path: Path, damaged: str) -> None:
    source = _backend()
    _train(source, range(1))
    directory = _save(source, tmp_path / "checkpoint")
    backend = _backend(spec(seed=3))
    before = saved(backend, "m", tmp_path / "before")
    tensors = directory / damaged
    tensors.write_bytes(tensors.read_bytes()[:-64])
    with pytest.raises(Exception, match="(?i)header|incomplete|invalid"):
        backend.load_state("m", directory, optimizer=True)
    tensors.unlink()
    with pytest.raises(FileNotFoundError):
        backend.load_state("m", directory, optimizer=True)
    description = json.loads((directory / "state.json").read_text())
    (directory / "state.json").write_text(json.dumps(description | {"format": 3}))
    with pytest.raises(ValueError, match="format 3"):
        backend.load_state("m", directory, optimizer=True)
    with pytest.raises(FileNotFoundError):
        backend.load_state("m", tmp_path / "nowhere", optimizer=True)
    assert_same(before, saved(backend, "m", tmp_path / "after"))


def test_a_save_writes_only_safetensors_and_json(tmp_path: Path) -> None:
    backend = _backend()
    adapter = {"adapter_config.json", "adapter_model.safetensors"}
    assert {path.name for path in _save(backend, tmp_path / "new").iterdir()} == adapter | {"state.json"}
    _train(backend, range(1))
    trained = _save(backend, tmp_path / "s")
    assert {path.name for path in trained.iterdir()} == adapter | {"state.json", "optimizer.safetensors"}
    (tmp_path / "a").mkdir()
    backend.save_adapter("m", tmp_path / "a")
    assert {path.name for path in (tmp_path / "a").iterdir()} == adapter
    for name in adapter:
        assert (tmp_path / "a" / name).read_bytes() == (trained / name).read_bytes(), (
            "the saved state holds the same adapter"
        )


def test_a_bfloat16_adapter_is_the_rounded_one_and_the_training_state_stays_float32(tmp_path: Path) -> None:
    backend = _backend()
    _train(backend, range(1))
    before = _save(backend, tmp_path / "before")
    (tmp_path / "halves").mkdir()
    backend.save_adapter("m", tmp_path / "halves", dtype="bfloat16")
    exact = load_file(before / "adapter_model.safetensors")
    halves = load_file(tmp_path / "halves" / "adapter_model.safetensors")
    assert halves.keys() == exact.keys()
    for name, tensor in exact.items():
        assert tensor.dtype == torch.float32
        assert halves[name].dtype == torch.bfloat16
        assert torch.equal(halves[name], tensor.to(torch.bfloat16)), name
    assert any(not torch.equal(halves[name].float(), tensor) for name, tensor in exact.items())
    after = _save(backend, tmp_path / "after")
    for file in before.iterdir():
        assert (after / file.name).read_bytes() == file.read_bytes(), "the training state is not rounded"


def test_a_saved_state_holds_the_weights_once(tmp_path: Path) -> None:
    backend = _backend()
    directory = _save(backend, tmp_path / "new")
    weights = sum(view.nbytes for view in saved(backend, "m", tmp_path / "s").values())
    assert sum(file.stat().st_size for file in directory.iterdir()) < 1.3 * weights


@pytest.mark.parametrize("optimizer", [True, False])
def test_state_in_the_first_format_is_still_read(tmp_path: Path, optimizer: bool) -> None:
    first = _backend()
    _train(first, range(2))
    _forward_backward(first, 2)
    directory = _save(first, tmp_path / "checkpoint")
    old = tmp_path / "old"
    old.mkdir()
    save_file(saved(first, "m", tmp_path / "s"), old / "state.safetensors")
    description = json.loads((directory / "state.json").read_text())
    (old / "state.json").write_text(
        json.dumps({key: value for key, value in description.items() if key != "parts"} | {"format": 1})
    )
    states = []
    for number, source in enumerate((directory, old)):
        backend = _backend(spec(seed=77))
        backend.load_state("m", source, optimizer=optimizer)
        _train(backend, range(3, 5))
        states.append(saved(backend, "m", tmp_path / str(number)))
    assert_same(*states)


def test_unknown_models_are_refused(tmp_path: Path) -> None:
    backend = _backend()
    backend.delete_model("m")
    backend.delete_model("never existed")
    for action in (
        lambda: backend.save_state("m", tmp_path),
        lambda: backend.load_state("m", tmp_path, optimizer=True),
        lambda: backend.save_adapter("m", tmp_path),
        lambda: backend.optim_step("m", STEP),
    ):
        with pytest.raises(InvalidRequest, match="model_id: there is no model m"):
            action()
