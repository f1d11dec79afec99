"""Gradient checkpointing by what fits: when decoder layers are computed again, and that no number changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch_lora_support import (
    VOCAB,
    assert_same,
    base_path,
    files_saved,
    grpo,
    make_backend,
    make_full,
    ok,
    saved,
    sft,
    spec,
    train,
)

from skyrl.base.config.loading import load_config
from skyrl.base.config.server import ConfigError
from skyrl.trainer.attention import packed_attention
from skyrl.trainer.lora.linear import MultiLoraLinear
from skyrl.trainer.model import logprobs, recomputation
from skyrl.trainer.model.packed_model import PackedModel
from skyrl.trainer.model.recomputation import Recomputation
from skyrl.trainer.protocol import AdamParams, OutOfMemory, PassResult
from tests.families import OPT, make_family, save_random
from tests.local_ranks import rank_of

LENGTHS = (40, 40, 20)
STEP = AdamParams(learning_rate=1e-2)


def _of(backend: Any) -> Recomputation:
    return rank_of(backend).base.packed.recomputation


def _with_model(make: Any = make_backend, *arguments: Any, **options: Any) -> Any:
    backend = make(*arguments, **options)
    backend.create_model("m", spec(0) if make is make_full else spec())
    return backend


def _free(monkeypatch: pytest.MonkeyPatch, free: float) -> None:
    monkeypatch.setattr(recomputation, "FREE_ANYHOW", 0)
    monkeypatch.setattr(recomputation, "free_host_bytes", lambda: free)


def test_it_is_chosen_by_what_fits_unless_a_setting_forces_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_config({"base_model": base_path()}).backend_config.trainer.gradient_checkpointing == "auto"
    for value in (True, False):
        assert _of(make_backend(gradient_checkpointing=value)).pays(10**9) is value
    chosen = _of(make_backend())
    assert not chosen.pays(1), "without a look at the memory"
    _free(monkeypatch, 2 * 100 * chosen.bytes_of_row)
    assert [chosen.pays(rows) for rows in (100, 101)] == [False, True], "half of the free memory"


@pytest.mark.parametrize(
    ("architecture", "inputs_and_outputs"),
    [("qwen3", 48 * 7 + 2 * 64 + 2 * 32 + 3 * 80), ("mixture", 48 * 4 + 2 * 64 + 2 * 32 + 2 * (48 * 2 + 24 * 3))],
)
def test_the_first_guess_is_twice_what_linear_layers_and_used_experts_take_and_give(
    architecture: str, inputs_and_outputs: int
) -> None:
    assert _of(make_backend(architecture)).bytes_of_row == 2.0 * 4 * 2 * inputs_and_outputs


@pytest.mark.parametrize(("make", "architecture"), [(make_backend, "qwen3"), (make_full, "mixture")])
def test_the_first_large_micro_batch_and_shared_prompts_tell_what_a_row_needs(make: Any, architecture: str) -> None:
    backend = _with_model(make, architecture, micro_batch_tokens=4096)
    found = [_of(backend).bytes_of_row]
    for data in (sft(0, 30), sft(0, *[25] * 8), sft(0, 90), grpo(0, 1, 12, 120, 20), sft(0, *[25] * 8)):
        loss = "cross_entropy" if "weights" in data[0].loss_inputs else "importance_sampling"
        ok(backend.run([train("m", data, loss)]))
        found.append(_of(backend).bytes_of_row)
    guess, of_few, measured, again, shared, last = found
    assert of_few == guess, "too few rows to tell"
    assert guess / 3 < measured < guess, "the guess is rather too high"
    assert again == measured
    assert shared > 1.05 * measured, "shared prompts need more for a row"
    assert last == shared, "the largest figure stays"


def test_the_weights_of_an_adapter_do_not_count_as_activations() -> None:
    found = []
    for rank in (8, 32):
        backend = make_backend()
        backend.create_model("m", spec(rank))
        ok(backend.run([train("m", sft(0, *LENGTHS))]))
        found.append(_of(backend).bytes_of_row)
    low_rank = 4 * 2 * 7 * (32 - 8)
    """Bytes of a row's products with lora_A, of seven layers in each of two decoder layers."""
    assert found[1] - found[0] <= low_rank


class _Lacking:
    """Memory that suffices only while layers are recomputed, if at all. `attempts`: whether they were, for each
    backward."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, suffices: bool) -> None:
        self.attempts: list[bool] = []
        inner = PackedModel._hidden_states

        def hidden_states(model: PackedModel, slices: Any) -> Tensor:
            if torch.is_grad_enabled():
                self.attempts.append(model.decoder_layers[0].training)
                if not (self.attempts[-1] and suffices):
                    raise torch.OutOfMemoryError("no memory left")
            return inner(model, slices)

        monkeypatch.setattr(PackedModel, "_hidden_states", hidden_states)


def test_an_item_without_memory_runs_again_with_recomputed_layers_and_the_next_ones_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same bits."""
    states, needed, attempts = [], 0.0, list[bool]()
    for name in ("expected", "found"):
        backend = _with_model()
        if states:
            attempts = _Lacking(monkeypatch, suffices=True).attempts
            _free(monkeypatch, 8 * sum(LENGTHS) * needed)
        for step in range(3):
            ok(backend.run([train("m", sft(step, *LENGTHS))]))
            backend.optim_step("m", STEP)
        needed = _of(backend).bytes_of_row
        states.append(saved(backend, "m", tmp_path / name))
    assert_same(*states)
    assert attempts == [False, True, True, True]


@pytest.mark.parametrize(
    ("make", "options", "suffices", "attempts"),
    [
        (make_backend, {}, False, [False, True]),
        (make_backend, {"gradient_checkpointing": True}, False, [True]),
        (make_backend, {"gradient_checkpointing": False}, False, [False]),
        (make_full, {}, True, [False]),  # a part of its gradient may have been added
    ],
    ids=["twice", "recomputed", "kept", "whole model"],
)
def test_a_pass_fails_where_no_other_attempt_may_help(
    monkeypatch: pytest.MonkeyPatch, make: Any, options: dict[str, Any], suffices: bool, attempts: list[bool]
) -> None:
    lacking = _Lacking(monkeypatch, suffices=suffices)
    backend = _with_model(make, **options)
    _free(monkeypatch, 2 * 9 * _of(backend).bytes_of_row)
    (outcome,) = backend.run([train("m", sft(0, 9))])
    assert isinstance(outcome, OutOfMemory)
    assert lacking.attempts == attempts
    (later,) = backend.run([train("m", sft(0, 9))])
    assert isinstance(later, PassResult if suffices else OutOfMemory), "later passes are recomputed at once"


def test_one_item_of_several_without_memory_is_recomputed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    lacking = _Lacking(monkeypatch, suffices=True)
    backend = make_backend(merge=True)
    for name in ("a", "b"):
        backend.create_model(name, spec())
    ok(backend.run([train("a", sft(0, 40)), train("b", sft(1, 8))]))
    assert lacking.attempts == [False, False, True, False, True], "together, then each alone, and recomputed"


def test_one_lack_of_memory_does_not_slow_down_what_needs_little_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have come from elsewhere."""
    chosen = _of(make_backend())
    _free(monkeypatch, 1000 * 100 * chosen.bytes_of_row)
    assert chosen.ran_out(100)
    assert not chosen.pays(100)


def test_recomputed_layers_keep_little_more_than_their_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: dict[int, int] = {}
    inner = PackedModel._hidden_states

    def keep(tensor: Tensor) -> Tensor:
        if not isinstance(tensor if tensor._base is None else tensor._base, nn.Parameter):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    def counted(model: PackedModel, slices: Any) -> Tensor:
        with saved_tensors_hooks(keep, lambda tensor: tensor):
            return inner(model, slices)

    monkeypatch.setattr(PackedModel, "_hidden_states", counted)
    found = []
    for setting in (False, True):
        kept.clear()
        ok(_with_model(gradient_checkpointing=setting).run([train("m", sft(0, *LENGTHS))]))
        found.append(sum(kept.values()))
    assert found[1] < found[0] / 5


def test_no_module_of_a_recomputed_layer_computes_in_training_mode(tmp_path: Path) -> None:
    """Dropout would change the numbers. Gemma's layers are none that compute in pieces."""
    backend = _with_model(path=make_family("gemma-3", tmp_path), gradient_checkpointing=True)
    packed = rank_of(backend).base.packed
    layer: Any = packed.decoder_layers[0]
    inside = [module for module in layer.modules() if not isinstance(module, MultiLoraLinear)]
    found: list[bool] = []
    layer.mlp.register_forward_pre_hook(lambda *_: found.append(any(module.training for module in inside)))
    ok(backend.run([train("m", sft(0, 9))]))
    assert found == [False, False], "in the forward, and in its repetition"
    others = [module for module in packed.model.modules() if not isinstance(module, MultiLoraLinear)]
    assert not any(module.training for module in others)


def test_a_layer_that_applies_dropout_itself_gives_the_gradient_of_kept_layers(tmp_path: Path) -> None:
    """OPT's layers ask for their own mode."""
    path = save_random(OPT, tmp_path / "opt")
    found = []
    for setting in (False, True):
        backend = _with_model(make_full, path=path, gradient_checkpointing=setting)
        assert _of(backend).pays(1) is setting
        assert rank_of(backend).base.packed.decoder_layers[0].dropout == 0.1
        ok(backend.run([train("m", sft(0, *LENGTHS))]))
        found.append(files_saved(backend, "m", tmp_path / str(setting)))
    assert any(name.startswith("gradient.") for name in found[0])
    assert_same(*found)


def test_nothing_that_is_recomputed_keeps_the_state_of_a_random_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is random, and on CUDA the state is read from the device."""
    backend = _with_model(gradient_checkpointing=True)
    monkeypatch.setattr(logprobs, "LOGITS_BYTES", 4 * VOCAB * 3)
    monkeypatch.setattr(packed_attention, "SCORES_BYTES", 1)
    monkeypatch.setattr(torch, "get_rng_state", lambda: pytest.fail("asked for"))
    ok(backend.run([train("m", sft(0, 9))]))
    states = [torch.ones(1, 2, 4, 8, requires_grad=True) for _ in range(3)]
    packed_attention.attend(*states, mask=None, causal=True, scale=None, softcap=2.0).sum().backward()


def test_a_layer_that_transformers_cannot_recompute_is_refused_or_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [nn.Sequential(nn.Linear(4, 4))]
    with pytest.raises(ConfigError, match="gradient_checkpointing: transformers cannot recompute Sequential"):
        Recomputation(layers, True)
    _free(monkeypatch, 0)
    assert not Recomputation(layers, "auto").pays(10**9)
