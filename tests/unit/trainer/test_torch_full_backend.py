"""Full fine-tuning equals a plain loop in torch, and its checkpoints restore every bit and load elsewhere."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3ForCausalLM

from skyrl.base.config.loading import load_config
from skyrl.base.config.server import ConfigError
from skyrl.base.tiny import model_path
from skyrl.base.types.weights import LoraSpec
from skyrl.trainer import adamw as optimizer
from skyrl.trainer import create_backend
from skyrl.trainer.adamw import LARGEST, NonFiniteGradient
from skyrl.trainer.full import full_model
from skyrl.trainer.full.parameters import FullParameters
from skyrl.trainer.protocol import AdamParams, Datum, DeviceFault, InvalidRequest, OutOfMemory, TrainingPass
from skyrl.trainer.ranks.full_backend import FullBackend, ShardedState
from tests.failures import FailingOperation
from tests.local_ranks import rank_of
from tests.unit.torch_lora_support import ARCHITECTURES, assert_same, base_path, make_backend, ok, rl, sft, spec, train

LENGTHS = (7, 21, 16, 30)
WHOLE = LoraSpec(rank=0, alpha=32.0, seed=0)
STEP = AdamParams(learning_rate=3e-3, weight_decay=0.1, grad_clip_norm=0.5, eps=1e-8)


def _backend(architecture: str = "qwen3", base: str | None = None, **trainer: Any) -> FullBackend:
    settings = {"trainer.full_finetuning": True, **{f"trainer.{key}": value for key, value in trainer.items()}}
    config = load_config({"base_model": base or base_path(architecture), "backend_config": settings})
    backend = create_backend(config)
    assert isinstance(backend, FullBackend)
    return backend


def _trained(architecture: str = "qwen3", steps: int = 2, **trainer: Any) -> FullBackend:
    backend = _backend(architecture, **trainer)
    backend.create_model("m", WHOLE)
    for step in range(steps):
        ok(backend.run([train("m", sft(step, *LENGTHS))]))
        backend.optim_step("m", STEP)
    return backend


def _saved(backend: FullBackend, directory: Path) -> dict[str, Tensor]:
    """Every tensor of a saved state, by its name in the files."""
    directory.mkdir(parents=True)
    backend.save_state("m", directory)
    return _tensors(directory)


def _tensors(directory: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        found |= load_file(file)
    return found


def _stock(directory: str | Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")


def _logprobs(model: Any, datum: Datum) -> Tensor:
    logits = model(input_ids=torch.from_numpy(datum.tokens)[None]).logits[0]
    targets = torch.from_numpy(datum.loss_inputs["target_tokens"])
    return logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]


def _loss(model: Any, data: list[Datum], loss_fn: str) -> tuple[Tensor, float]:
    """The sum over all tokens, and the sum of the terms' sizes, which bounds rounding."""
    loss, size = torch.zeros(()), 0.0
    for datum in data:
        lp = _logprobs(model, datum)
        inputs = {name: torch.from_numpy(value) for name, value in datum.loss_inputs.items()}
        if loss_fn == "cross_entropy":
            terms = inputs["weights"] * lp
        else:
            terms = (lp - inputs["logprobs"]).exp() * inputs["advantages"]
        loss, size = loss - terms.sum(), size + float(terms.detach().abs().sum())
    return loss, size


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("loss_fn", ["cross_entropy", "importance_sampling"])
def test_twenty_steps_equal_a_plain_loop_in_torch(tmp_path: Path, architecture: str, loss_fn: str) -> None:
    backend = _backend(architecture, micro_batch_tokens=50)
    backend.create_model("m", WHOLE)
    model = _stock(base_path(architecture))
    plain = torch.optim.AdamW(
        model.parameters(), lr=1e-3, betas=(STEP.beta1, STEP.beta2), eps=STEP.eps, weight_decay=STEP.weight_decay
    )
    params = AdamParams(learning_rate=1e-3, weight_decay=STEP.weight_decay, grad_clip_norm=0.5, eps=STEP.eps)
    for step in range(20):
        data = (sft if loss_fn == "cross_entropy" else rl)(step, *LENGTHS)
        loss, size = _loss(model, data, loss_fn)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        plain.step()
        plain.zero_grad()
        (result,) = ok(backend.run([train("m", data, loss_fn)]))
        assert result.metrics["loss:sum"] == pytest.approx(float(loss.detach()), rel=0, abs=1e-5 * size)
        metrics = backend.optim_step("m", params)
        assert metrics == {
            "grad_norm": pytest.approx(float(norm), rel=1e-4),
            "learning_rate": 1e-3,
            "optimizer_step": step + 1,
        }
    (directory := tmp_path / "export").mkdir()
    backend.save_adapter("m", directory)
    theirs = dict(model.named_parameters())
    ours = _tensors(directory)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        # Adam divides by the root of the second moment, which makes rounding of tiny gradients large
        torch.testing.assert_close(value, theirs[name].detach(), atol=3e-4, rtol=1e-4)
        assert float((value - theirs[name].detach()).abs().mean()) < 2e-6, name


def test_training_from_a_saved_state_equals_the_uninterrupted_run(tmp_path: Path) -> None:
    """Also where the chunks of a step and the files of a state are small, and with a pending gradient."""
    backend = _trained()
    ok(backend.run([train("m", sft(9, *LENGTHS))]))
    before = _saved(backend, tmp_path / "before")
    assert {name.split(".")[0] for name in before} == {"model", "lm_head", "exp_avg", "exp_avg_sq", "gradient"}
    backend.optim_step("m", STEP)
    end = _saved(backend, tmp_path / "end")

    again = _backend()
    again.restore_model("m", WHOLE, tmp_path / "before")
    assert_same(_saved(again, tmp_path / "again"), before)
    assert again.optim_step("m", STEP)["optimizer_step"] == 3
    assert_same(_saved(again, tmp_path / "again-end"), end)


def test_states_in_many_files_and_steps_in_many_chunks_give_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = _saved(_trained(), tmp_path / "whole")
    monkeypatch.setattr(optimizer, "CHUNK", 1024)
    monkeypatch.setattr(ShardedState.save_state, "__defaults__", (20_000,))
    backend = _trained()
    assert_same(_saved(backend, tmp_path / "parts"), whole)
    assert len(list((tmp_path / "parts").glob("model-*.safetensors"))) > 2
    assert len(list((tmp_path / "parts").glob("optimizer-*.safetensors"))) > 4
    backend.load_state("m", tmp_path / "whole", optimizer=False)
    backend.load_state("m", tmp_path / "parts", optimizer=True)
    assert_same(_saved(backend, tmp_path / "again"), whole)


def test_loading_an_optimizer_takes_no_second_copy_of_it(tmp_path: Path) -> None:
    backend = _backend()
    backend.create_model("m", WHOLE)
    ok(backend.run([train("m", sft(1, *LENGTHS))]))
    backend.optim_step("m", STEP)
    for name in ("saved", "again"):
        (tmp_path / name).mkdir()
    backend.save_state("m", tmp_path / "saved")
    parameters = rank_of(backend).parameters("m")
    moments = parameters.exp_avg
    ok(backend.run([train("m", sft(2, *LENGTHS))]))
    backend.optim_step("m", STEP)
    backend.load_state("m", tmp_path / "saved", optimizer=True)
    assert parameters.exp_avg is moments
    backend.save_state("m", tmp_path / "again")
    for file in ("model.safetensors", "optimizer-00001.safetensors"):
        assert (tmp_path / "again" / file).read_bytes() == (tmp_path / "saved" / file).read_bytes()


def test_loading_without_the_optimizer_restores_weights_and_resets_the_optimizer(tmp_path: Path) -> None:
    backend = _trained()
    before = _saved(backend, tmp_path / "before")
    ok(backend.run([train("m", sft(9, *LENGTHS))]))
    backend.optim_step("m", STEP)
    ok(backend.run([train("m", sft(9, *LENGTHS))]))
    backend.load_state("m", tmp_path / "before", optimizer=False)
    after = _saved(backend, tmp_path / "after")
    assert_same(after, {name: value for name, value in before.items() if name.startswith(("model", "lm_head"))})
    assert backend.optim_step("m", STEP) == {}


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3-tied", "llama"])
def test_transformers_load_the_export_and_give_the_same_logprobs(tmp_path: Path, architecture: str) -> None:
    backend = _trained(architecture)
    backend.save_adapter("m", tmp_path)
    data = sft(3, *LENGTHS)
    (result,) = ok(backend.run([TrainingPass("m", data, "cross_entropy", backward=False)]))
    loaded = _stock(tmp_path)
    for datum, logprobs in zip(data, result.logprobs, strict=True):
        np.testing.assert_allclose(logprobs, _logprobs(loaded, datum).detach(), atol=2e-5)
    base = _tensors(Path(base_path(architecture)))
    assert {name: (one.shape, one.dtype) for name, one in _tensors(tmp_path).items()} == {
        name: (one.shape, one.dtype) for name, one in base.items()
    }, "vLLM asks an update for the names and shapes of the checkpoint that it has loaded first"


def test_an_export_has_the_tokenizer_and_the_dtype_that_was_asked_for(tmp_path: Path) -> None:
    backend = _backend(base=str(model_path()))
    backend.create_model("m", WHOLE)
    (rounded := tmp_path / "rounded").mkdir()
    backend.save_adapter("m", rounded, dtype="bfloat16")
    assert {tensor.dtype for tensor in _tensors(rounded).values()} == {torch.bfloat16}
    assert json.loads((rounded / "config.json").read_text())["dtype"] == "bfloat16"
    assert AutoTokenizer.from_pretrained(rounded).encode("a b") == AutoTokenizer.from_pretrained(model_path()).encode(
        "a b"
    )
    assert all(path.suffix in (".json", ".safetensors", ".txt", ".jinja", ".model") for path in rounded.iterdir())
    assert_same(_tensors(rounded), {name: one.to(torch.bfloat16) for name, one in _tensors(Path(model_path())).items()})


def test_the_next_model_begins_with_the_base_models_weights(tmp_path: Path) -> None:
    backend = _trained()
    with pytest.raises(InvalidRequest, match="another model is being trained"):
        backend.create_model("n", WHOLE)
    with pytest.raises(InvalidRequest, match="m exists already"):
        backend.create_model("m", WHOLE)
    ok(backend.run([train("m", sft(1, 9))]))
    backend.delete_model("other")
    backend.delete_model("m")
    with pytest.raises(InvalidRequest, match="there is no model m"):
        backend.optim_step("m", STEP)
    backend.create_model("m", WHOLE)
    assert_same(_saved(backend, tmp_path / "new"), _tensors(Path(base_path())))
    assert backend.optim_step("m", STEP) == {}


def test_adapters_and_parts_of_a_model_are_refused() -> None:
    backend = _backend()
    with pytest.raises(InvalidRequest, match=r"lora_config.rank: must be 0, got 8.*trainer.full_finetuning"):
        backend.create_model("m", spec(8))
    with pytest.raises(InvalidRequest, match="train_attn, train_mlp and train_unembed must all be true"):
        backend.create_model("m", LoraSpec(0, 32.0, 0, train_mlp=False))
    with pytest.raises(InvalidRequest, match=r"lora_config.rank: 0 asks for full.*trainer.full_finetuning"):
        make_backend().create_model("m", WHOLE)


def test_the_checkpoint_of_an_adapter_and_that_of_a_whole_model_do_not_fit_each_other(tmp_path: Path) -> None:
    whole, adapters = _trained(), make_backend()
    adapters.create_model("a", spec(8))
    for name in ("whole", "adapter"):
        (tmp_path / name).mkdir()
    whole.save_state("m", tmp_path / "whole")
    adapters.save_state("a", tmp_path / "adapter")
    with pytest.raises(InvalidRequest, match="holds a LoRA adapter"):
        whole.load_state("m", tmp_path / "adapter", optimizer=True)
    with pytest.raises(InvalidRequest, match="holds a whole model"):
        adapters.load_state("a", tmp_path / "whole", optimizer=True)


@pytest.mark.parametrize("damaged", ["model.safetensors", "optimizer-00001.safetensors", "state.json"])
def test_loading_damaged_or_missing_files_changes_nothing(tmp_path: Path, damaged: str) -> None:
    backend = _trained()
    before = _saved(backend, tmp_path / "before")
    backend.save_state("m", tmp_path / "before")
    ok(backend.run([train("m", sft(9, *LENGTHS))]))
    backend.optim_step("m", STEP)
    now = _saved(backend, tmp_path / "now")
    file = tmp_path / "before" / damaged
    content = file.read_bytes()
    for bad in (content[: len(content) // 2], None):
        if bad is None:
            file.unlink()
        else:
            file.write_bytes(bad)
        with pytest.raises((OSError, ValueError, SafetensorError)):
            backend.load_state("m", tmp_path / "before", optimizer=True)
    assert_same(_saved(backend, tmp_path / "after"), now)
    assert before.keys() == now.keys()


def test_a_base_model_without_all_its_weights_is_refused(tmp_path: Path) -> None:
    """transformers itself draws random numbers for them."""
    shutil.copytree(base_path(), tmp_path / "model")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"the files lack model.layers.1.mlp.up_proj.weight"):
        _backend(base=str(tmp_path / "model"))


def test_a_base_model_with_weights_that_are_no_parameters_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    load: Any = Qwen3ForCausalLM.from_pretrained

    def with_a_buffer(*args: Any, **options: Any) -> Any:
        model, info = load(*args, **options)
        model.model.norm.register_buffer("running_mean", torch.zeros(4))
        return model, info

    monkeypatch.setattr(Qwen3ForCausalLM, "from_pretrained", with_a_buffer)
    with pytest.raises(
        ConfigError, match=r"no parameters, such as model.norm.running_mean: full fine-tuning does not train them"
    ):
        _backend()


def test_a_pickle_in_a_checkpoint_is_not_read(tmp_path: Path) -> None:
    backend = _trained()
    backend.save_state("m", tmp_path)
    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises((OSError, ValueError)):
        backend.load_state("m", tmp_path, optimizer=True)


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


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_is_cleared_and_changes_nothing(tmp_path: Path, bad: float) -> None:
    backend = _trained()
    before = _saved(backend, tmp_path / "before")
    ok(backend.run([train("m", sft(9, *LENGTHS))]))
    gradient = rank_of(backend).parameters("m").gradient
    assert gradient is not None
    gradient[5] = bad
    with pytest.raises(NonFiniteGradient, match="the weights were not changed and the gradient was cleared"):
        backend.optim_step("m", STEP)
    assert_same(_saved(backend, tmp_path / "after"), before)


def test_a_pass_that_fails_at_any_operation_leaves_the_gradient(tmp_path: Path) -> None:
    """Every 23rd operation fails, in a pass of two slices that follows another pass."""
    backend = _trained(micro_batch_tokens=32)
    ok(backend.run([train("m", sft(7, 12))]))
    start = _saved(backend, tmp_path / "start")
    failures = 0
    for point in range(0, 100_000, 23):
        failing = FailingOperation(point)
        with failing:
            (outcome,) = backend.run([train("m", rl(1, 9, 30), "ppo")])
        if not failing.failed:
            break
        assert isinstance(outcome, OutOfMemory)
        failures += 1
        assert_same(_saved(backend, tmp_path / f"now-{point}"), start)
    assert failures > 10


def test_weights_that_cannot_be_computed_with_after_a_step_are_a_fault_of_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def failing() -> None:
        raise RuntimeError("CUDA error: invalid device function")

    backend = _trained()
    ok(backend.run([train("m", sft(7, 12))]))
    monkeypatch.setattr(rank_of(backend), "_weights_changed", failing)
    with pytest.raises(DeviceFault, match="in the middle of an optimizer step: CUDA error: invalid device function"):
        backend.optim_step("m", STEP)


@pytest.mark.parametrize("steps", [0, 1], ids=["first", "later"])
def test_a_step_without_memory_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    backend = _trained(steps=steps)
    ok(backend.run([train("m", sft(7, 12))]))
    start = _saved(backend, tmp_path / "start")

    def no_memory(*args: object, **kwargs: object) -> Tensor:
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as patched:
        patched.setattr(torch, "empty", no_memory)  # the last allocation of a step
        with pytest.raises(OutOfMemory):
            backend.optim_step("m", STEP)
    assert_same(_saved(backend, tmp_path / "after"), start)
    assert backend.optim_step("m", STEP)["optimizer_step"] == steps + 1


@pytest.mark.parametrize("beta", [0.0, 1 - 2**-53])
def test_the_largest_parameters_of_a_step_do_not_end_it_in_its_middle(beta: float) -> None:
    """torch raises for factors that do not fit into float32."""
    backend = _trained(steps=0)
    ok(backend.run([train("m", sft(1, 12))]))
    largest = AdamParams(LARGEST, beta, beta, LARGEST, weight_decay=LARGEST)
    assert backend.optim_step("m", largest)["learning_rate"] == LARGEST


def test_gradient_checkpointing_gives_the_same_bits(tmp_path: Path) -> None:
    plain, recomputed = _trained(), _trained(gradient_checkpointing=True)
    assert_same(_saved(plain, tmp_path / "plain"), _saved(recomputed, tmp_path / "recomputed"))


def test_a_pass_that_overflows_keeps_no_gradient(tmp_path: Path) -> None:
    backend = _trained()
    before = _saved(backend, tmp_path / "before")
    data = rl(1, 12)
    data[0].loss_inputs["logprobs"][:] = -1e30
    data[0].loss_inputs["advantages"][:] = 1.0
    (outcome,) = backend.run([train("m", data, "importance_sampling")])
    assert isinstance(outcome, InvalidRequest)
    assert "no gradient was kept" in str(outcome)
    assert_same(_saved(backend, tmp_path / "after"), before)
