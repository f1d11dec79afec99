"""What only full fine-tuning promises: the steps of a plain loop in torch, exports that load elsewhere, states in many
files, and mixtures over ranks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch_lora_support import (
    assert_close,
    assert_same,
    base_path,
    files_saved,
    make_full,
    ok,
    rl,
    sft,
    stock_logprobs,
    stock_terms,
    stored_tensors,
    train,
)
from trainer_kinds import STEP, WHOLE, Run, assert_close_results, closed_at_end
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3ForCausalLM

from skyrl.base.config.server import ConfigError
from skyrl.base.tiny import model_path
from skyrl.trainer import adamw as optimizer
from skyrl.trainer.experts.routing import CORRECTIONS
from skyrl.trainer.full import full_model
from skyrl.trainer.full.parameters import FullParameters
from skyrl.trainer.protocol import AdamParams, DeviceFault, OutOfMemory, TrainingPass
from skyrl.trainer.ranks import full_backend
from skyrl.trainer.ranks.full_backend import FullBackend, ShardedState
from skyrl.trainer.ranks.full_rank import FullRank
from tests.failures import FailingOperation
from tests.families import MIXTURES, make_family
from tests.local_ranks import rank_of

LENGTHS = (7, 21, 16, 30)
Make = Callable[..., Any]


@pytest.fixture
def full() -> Iterator[Make]:
    """`make_full`; closes the backends at the end."""
    with closed_at_end(make_full) as make:
        yield make


def _trained(make: Make, *arguments: Any, **options: Any) -> FullBackend:
    backend = make(*arguments, **options)
    backend.create_model("m", WHOLE)
    ok(backend.run([train("m", sft(1, *LENGTHS))]))
    backend.optim_step("m", STEP)
    return backend


def _stock(directory: str | Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")


@pytest.mark.parametrize(
    ("architecture", "loss_fn"),
    [
        ("qwen3", "cross_entropy"),
        ("qwen3-tied", "importance_sampling"),
        ("qwen2", "cross_entropy"),
        ("qwen2-window", "importance_sampling"),
        ("llama", "importance_sampling"),
    ],
)
def test_steps_equal_a_plain_loop_in_torch_and_transformers_load_the_export(
    tmp_path: Path, full: Make, architecture: str, loss_fn: str
) -> None:
    backend = full(architecture, micro_batch_tokens=50)
    backend.create_model("m", WHOLE)
    model = _stock(base_path(architecture))
    params = AdamParams(learning_rate=1e-3, weight_decay=0.1, grad_clip_norm=0.5, eps=1e-8)
    plain = torch.optim.AdamW(
        model.parameters(), lr=1e-3, betas=(params.beta1, params.beta2), eps=params.eps, weight_decay=0.1
    )
    for step in range(8):
        data = (sft if loss_fn == "cross_entropy" else rl)(step, *LENGTHS)
        terms = torch.cat([stock_terms(stock_logprobs(model, datum), datum) for datum in data])
        loss, size = terms.sum(), float(terms.detach().abs().sum())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        plain.step()
        plain.zero_grad()
        (result,) = ok(backend.run([train("m", data, loss_fn)]))
        assert result.metrics["loss:sum"] == pytest.approx(float(loss.detach()), rel=0, abs=1e-5 * size)
        assert backend.optim_step("m", params) == {
            "grad_norm": pytest.approx(float(norm), rel=1e-4),
            "learning_rate": 1e-3,
            "optimizer_step": step + 1,
        }
    backend.save_adapter("m", tmp_path)
    theirs, ours = dict(model.named_parameters()), stored_tensors(tmp_path)
    assert {name: (one.shape, one.dtype) for name, one in ours.items()} == {
        name: (one.shape, one.dtype) for name, one in stored_tensors(Path(base_path(architecture))).items()
    }, "vLLM asks an update for the names and shapes of the checkpoint that it has loaded first"
    for name, value in ours.items():
        # Adam divides by the root of the second moment, which makes rounding of tiny gradients large
        torch.testing.assert_close(value, theirs[name].detach(), atol=3e-4, rtol=1e-4)
        assert float((value - theirs[name].detach()).abs().mean()) < 2e-6, name
    (result,) = ok(backend.run([TrainingPass("m", sft(3, *LENGTHS), "cross_entropy", backward=False)]))
    loaded = _stock(tmp_path)
    for datum, logprobs in zip(sft(3, *LENGTHS), result.logprobs, strict=True):
        np.testing.assert_allclose(logprobs, stock_logprobs(loaded, datum).detach(), atol=2e-5)


class InSmallChunks(FullRank):
    def load(self) -> Any:
        optimizer.CHUNK = 1024  # in a process of its own
        return super().load()


@pytest.mark.parametrize("ranks", [None, 3])
def test_states_in_many_files_and_pages_and_steps_in_many_chunks_give_the_same_bits(
    tmp_path: Path, full: Make, monkeypatch: pytest.MonkeyPatch, ranks: int | None
) -> None:
    whole = _trained(full, "qwen3-tied", ranks)
    expected = files_saved(whole, "m", tmp_path / "whole")
    monkeypatch.setattr(optimizer, "CHUNK", 1024)
    monkeypatch.setattr(full_backend, "PAGE", 5000)
    monkeypatch.setattr(ShardedState.save_state, "__defaults__", (20_000,))
    backend = _trained(full, "qwen3-tied", ranks, rank_class=InSmallChunks)
    assert_same(files_saved(backend, "m", tmp_path / "parts"), expected)
    assert len(list((tmp_path / "parts").glob("model-*.safetensors"))) > 2
    assert len(list((tmp_path / "parts").glob("optimizer-*.safetensors"))) > 4
    assert (tmp_path / "parts" / "model.safetensors.index.json").exists()
    whole.load_state("m", tmp_path / "parts", optimizer=False)
    backend.load_state("m", tmp_path / "parts", optimizer=True)
    assert_same(files_saved(backend, "m", tmp_path / "again"), expected)


def test_loading_an_optimizer_takes_no_second_copy_of_it(tmp_path: Path, full: Make) -> None:
    backend = _trained(full)
    files_saved(backend, "m", tmp_path / "saved")
    moments = rank_of(backend).parameters("m").exp_avg
    backend.load_state("m", tmp_path / "saved", optimizer=True)
    assert rank_of(backend).parameters("m").exp_avg is moments


def test_an_export_has_the_tokenizer_and_the_dtype_that_was_asked_for(tmp_path: Path, full: Make) -> None:
    backend = full(path=str(model_path()))
    backend.create_model("m", WHOLE)
    backend.save_adapter("m", tmp_path, dtype="bfloat16")
    base = {name: one.bfloat16() for name, one in stored_tensors(Path(model_path())).items()}
    assert_same(stored_tensors(tmp_path), base)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    one, other = (AutoTokenizer.from_pretrained(path).encode("a b") for path in (tmp_path, model_path()))
    assert one == other
    assert all(path.suffix in (".json", ".safetensors", ".txt", ".jinja", ".model") for path in tmp_path.iterdir())


def test_a_base_model_with_weights_that_are_no_parameters_is_refused(
    full: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    load: Any = Qwen3ForCausalLM.from_pretrained

    def with_a_buffer(*args: Any, **options: Any) -> Any:
        model, info = load(*args, **options)
        model.model.norm.register_buffer("running_mean", torch.zeros(4))
        return model, info

    monkeypatch.setattr(Qwen3ForCausalLM, "from_pretrained", with_a_buffer)
    with pytest.raises(ConfigError, match=r"no parameters, such as model.norm.running_mean: full fine-tuning does not"):
        full()


@pytest.mark.parametrize(
    ("values", "finite"),
    [
        ([3e38] * 4, True),  # whose sum is not
        ([1.0, float("nan")], False),
        ([float("inf"), float("-inf")], False),
        ([1.0, float("-inf")], False),
    ],
    ids=str,
)
def test_a_save_finds_weights_that_are_not_finite(values: list[float], finite: bool) -> None:
    weights = {"a": torch.zeros(3), "empty": torch.zeros(0, 2), "b": torch.tensor(values)}
    assert full_model.are_finite(FullParameters(weights, torch.device("cpu"))) is finite


@pytest.mark.parametrize("ranks", [None, 2])
def test_weights_that_are_not_finite_on_one_rank_are_not_exported(
    tmp_path: Path, full: Make, ranks: int | None
) -> None:
    backend = full(ranks=ranks)
    backend.create_model("m", WHOLE)
    weights = files_saved(backend, "m", tmp_path / "state")
    weights["lm_head.weight"][-1, 0] = float("inf")
    save_file(weights, tmp_path / "state" / "model.safetensors")
    backend.load_state("m", tmp_path / "state", optimizer=False)
    with pytest.raises(FloatingPointError, match="hold NaN or infinity"):
        backend.save_adapter("m", tmp_path)


def test_a_pass_that_fails_at_any_operation_leaves_the_gradient(tmp_path: Path, full: Make) -> None:
    """Every 67th operation fails, in a pass of two items that follows another pass."""
    backend = _trained(full, micro_batch_tokens=32)
    ok(backend.run([train("m", sft(7, 12))]))
    start = files_saved(backend, "m", tmp_path / "start")
    failures = 0
    for point in range(0, 100_000, 67):
        failing = FailingOperation(point)
        with failing:
            (outcome,) = backend.run([train("m", rl(1, 9, 30), "ppo")])
        if not failing.failed:
            break
        assert isinstance(outcome, OutOfMemory)
        failures += 1
        assert_same(files_saved(backend, "m", tmp_path / f"now-{point}"), start)
    assert failures > 10


def test_weights_that_cannot_be_computed_with_after_a_step_are_a_fault_of_the_device(
    full: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing() -> None:
        raise RuntimeError("CUDA error: invalid device function")

    backend = _trained(full)
    ok(backend.run([train("m", sft(7, 12))]))
    monkeypatch.setattr(rank_of(backend), "_weights_changed", failing)
    with pytest.raises(DeviceFault, match="in the middle of an optimizer step: CUDA error: invalid device function"):
        backend.optim_step("m", STEP)


SMALL: dict[str, Any] = {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
"""Heads of the delta rule."""
IN_CI = ("gpt-oss", "deepseek-v3", "nemotron-h")
"""Experts with biases in one tensor, corrected routers with latent attention, and experts without gates."""
TOWERS = ("visual.", "vision_", "model.audio.", "mm_projector.", "multi_modal_projector.", "mlp1.")
"""Parts of models that see; their names are those of no other layers."""
STAYING = (*CORRECTIONS, ".mlp.gate.bias", "layer_scalar")
"""Buffers, as files name them."""


@pytest.mark.parametrize(
    "family", [name if name in IN_CI else pytest.param(name, marks=pytest.mark.slow) for name in MIXTURES]
)
def test_two_ranks_train_a_mixture_as_one_device_does_and_write_the_same_files(
    tmp_path: Path, full: Make, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """Ten times the bound of dense models: a router sums the roundings of all experts, and a step of 1e-2 spreads
    them."""
    monkeypatch.setattr(full_backend, "PAGE", 50_000)  # so that pages cut the tensors of experts
    path = make_family(family, tmp_path, **(SMALL if family.startswith(("qwen3-next", "qwen3.5")) else {}))
    backends, runs = [full(path=path), full(path=path, ranks=2)], []
    for number, backend in enumerate(backends):
        backend.create_model("m", WHOLE)
        results = ok(backend.run([train("m", sft(0, 3, 17, 1, 40)), train("m", rl(10, 12, 5, 30), "ppo")]))
        metrics = [backend.optim_step("m", STEP)]
        results += ok(backend.run([train("m", sft(9, 8, 20))]))
        runs.append(Run(results, metrics, files_saved(backend, "m", tmp_path / f"state{number}")))
    assert_close_results(runs[1], runs[0], 1e-4)
    assert_close(runs[1].state, runs[0].state, 1e-4)
    backends[0].load_state("m", tmp_path / "state1", optimizer=True)
    files_saved(backends[0], "m", tmp_path / "again")
    for file in (tmp_path / "state1").iterdir():
        assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes(), file.name
    released = load_file(Path(path) / "model.safetensors")
    backends[1].delete_model("m")
    backends[1].create_model("m", WHOLE)
    (tmp_path / "export").mkdir()
    backends[1].save_adapter("m", tmp_path / "export", dtype="bfloat16")
    exported = load_file(tmp_path / "export" / "model.safetensors")
    assert exported.keys() == released.keys()
    for name, one in released.items():
        as_it_is = name.endswith(STAYING) or any(part in name for part in TOWERS)
        assert torch.equal(exported[name], one if as_it_is else one.bfloat16()), name
