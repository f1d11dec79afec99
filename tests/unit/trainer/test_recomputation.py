"""Gradient checkpointing by what fits: when decoder layers are computed again, and that no number changes."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch_lora_support import (
    ARCHITECTURES,
    VOCAB,
    assert_same,
    base_path,
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
from skyrl.trainer.protocol import AdamParams, OutOfMemory
from tests.failures import FailingOperation
from tests.local_ranks import rank_of

LENGTHS = (40, 40, 20)


def _of(backend: Any) -> Recomputation:
    base = rank_of(backend).base
    return base.packed.recomputation


def _free(monkeypatch: pytest.MonkeyPatch, free: float) -> None:
    monkeypatch.setattr(recomputation, "FREE_ANYHOW", 0)
    monkeypatch.setattr(recomputation, "free_host_bytes", lambda: free)


def _state(backend: Any, directory: Path) -> dict[str, torch.Tensor]:
    backend.create_model("m", spec())
    for step in range(2):
        ok(backend.run([train("m", sft(step, *LENGTHS))]))
        backend.optim_step("m", AdamParams(learning_rate=1e-2))
    ok(backend.run([train("m", sft(3, *LENGTHS))]))
    return saved(backend, "m", directory)


def test_it_is_chosen_by_what_fits_unless_a_setting_forces_it() -> None:
    config = load_config({"base_model": base_path()})
    assert config.backend_config.trainer.gradient_checkpointing == "auto"
    for value in (True, False):
        settings = {"trainer.gradient_checkpointing": value}
        config = load_config({"base_model": base_path(), "backend_config": settings})
        assert config.backend_config.trainer.gradient_checkpointing is value
        assert _of(make_backend(gradient_checkpointing=value)).pays(10**9) is value


def test_layers_are_recomputed_only_where_their_activations_exceed_half_of_the_free_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen = _of(make_backend())
    per_row = chosen._per_row
    assert per_row == 2.0 * 4 * 2 * (48 * 7 + 2 * 64 + 2 * 32 + 3 * 80), "per input and output of two layers' linears"
    assert not chosen.pays(1), "without a look at the memory"
    _free(monkeypatch, 2 * 100 * per_row)
    assert not chosen.pays(100)
    assert chosen.pays(101)


def test_a_recomputed_micro_batch_gives_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[bool] = []
    pays = Recomputation.pays
    monkeypatch.setattr(
        Recomputation, "pays", lambda self, rows: (chosen.append(answer := pays(self, rows)), answer)[1]
    )
    kept = _state(make_backend(), tmp_path / "kept")
    assert set(chosen) == {False}
    _free(monkeypatch, 0)
    assert_same(_state(make_backend(), tmp_path / "again"), kept)
    assert set(chosen[3:]) == {True}


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, "mixture", "mixture-with-dense-layer"])
@pytest.mark.parametrize("make", [make_backend, make_full])
def test_the_first_large_micro_batch_tells_what_a_row_needs(architecture: str, make: Any) -> None:
    options = {} if make is make_backend else {"micro_batch_tokens": 4096}
    backend = make(architecture, **options)
    mlp = not architecture.startswith("mixture")
    backend.create_model("m", spec(train_mlp=mlp) if make is make_backend else spec(0))
    chosen = _of(backend)
    guess = chosen._per_row
    ok(backend.run([train("m", sft(0, 30))]))
    assert chosen._per_row == guess, "too few rows to tell"
    ok(backend.run([train("m", sft(0, *LENGTHS))]))
    measured = chosen._per_row
    assert guess / 3 < measured < guess, "the guess is rather too high"
    ok(backend.run([train("m", sft(0, 90))]))
    assert chosen._per_row == measured


def test_a_much_larger_micro_batch_is_measured_again() -> None:
    backend = make_backend()
    backend.create_model("m", spec())
    chosen = _of(backend)
    ok(backend.run([train("m", sft(0, *[50] * 2))]))
    chosen._per_row = 1.0
    ok(backend.run([train("m", sft(0, *[57] * 7))]))
    assert chosen._per_row == 1.0, "399 rows are fewer than four times 100"
    ok(backend.run([train("m", sft(0, *[50] * 8))]))
    assert chosen._per_row > 1000


@pytest.mark.parametrize("make", [make_backend, make_full])
def test_shared_prompts_are_measured_for_they_need_more_for_a_row(make: Any) -> None:
    backend = make(micro_batch_tokens=4096)
    backend.create_model("m", spec() if make is make_backend else spec(0))
    chosen = _of(backend)
    ok(backend.run([train("m", sft(0, *[25] * 8))]))
    alone = chosen._per_row
    ok(backend.run([train("m", grpo(0, 1, 12, 120, 20), "importance_sampling")]))
    shared = chosen._per_row
    assert shared > 1.05 * alone
    ok(backend.run([train("m", sft(0, *[25] * 8))]))
    assert chosen._per_row == shared, "the largest figure stays"


class _Lacking:
    """Memory that suffices only while layers are recomputed. `attempts`: whether they were, for each backward."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, suffices: bool = True) -> None:
        self.attempts: list[bool] = []
        inner = PackedModel._hidden_states

        def hidden_states(model: PackedModel, slices: Any) -> torch.Tensor:
            if torch.is_grad_enabled():
                self.attempts.append(model.decoder_layers[0].training)
                if not (self.attempts[-1] and suffices):
                    raise torch.OutOfMemoryError("no memory left")
            return inner(model, slices)

        monkeypatch.setattr(PackedModel, "_hidden_states", hidden_states)


def test_a_slice_without_memory_runs_again_with_recomputed_layers_and_the_next_ones_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = make_backend()
    expected = _state(backend, tmp_path / "expected")
    needed = sum(LENGTHS) * _of(backend)._per_row
    lacking = _Lacking(monkeypatch)
    _free(monkeypatch, 8 * needed)
    assert_same(_state(make_backend(), tmp_path / "found"), expected)
    assert lacking.attempts == [False, True, True, True]


def test_one_lack_of_memory_does_not_slow_down_what_needs_little_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have come from elsewhere."""
    chosen = _of(make_backend())
    _free(monkeypatch, 1000 * 100 * chosen._per_row)
    assert chosen.ran_out(100)
    assert not chosen.pays(100)


def test_one_slice_of_several_without_memory_is_recomputed_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lacking = _Lacking(monkeypatch)
    backend = make_backend(merge=True)
    for name in ("a", "b"):
        backend.create_model(name, spec())
    ok(backend.run([train("a", sft(0, 40)), train("b", sft(1, 8))]))
    assert lacking.attempts == [False, False, True, False, True], "together, then each alone, and recomputed"


def test_a_failed_attempt_that_was_measured_frees_what_it_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second attempt has the memory of the first."""
    backend = make_backend()
    backend.create_model("m", spec())
    tensors = [rank_of(backend).adapters["m"].weights, *rank_of(backend).base.packed.state_dict().values()]
    weights = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    made: list[weakref.ref[torch.UntypedStorage]] = []
    left: list[int] = []

    class Fails(FailingOperation):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = super().__torch_dispatch__(func, types, args, kwargs)
            if isinstance(result, torch.Tensor) and not self.failed:
                made.append(weakref.ref(result.untyped_storage()))
            return result

    def ran_out(rows: int) -> bool:
        left.extend(kept.nbytes() for each in made if (kept := each()) is not None and kept.data_ptr() not in weights)
        return True

    monkeypatch.setattr(_of(backend), "ran_out", ran_out)
    assert _of(backend)._tells(80, 0)
    with Fails(300):
        ok(backend.run([train("m", sft(0, 40, 40))]))
    assert made
    assert left == []


def test_a_second_lack_fails_the_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    lacking = _Lacking(monkeypatch, suffices=False)
    backend = make_backend()
    backend.create_model("m", spec())
    (outcome,) = backend.run([train("m", sft(0, 9))])
    assert isinstance(outcome, OutOfMemory)
    assert lacking.attempts == [False, True]


@pytest.mark.parametrize("setting", [True, False])
def test_a_setting_that_decides_is_kept_without_memory(setting: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    lacking = _Lacking(monkeypatch, suffices=False)
    backend = make_backend(gradient_checkpointing=setting)
    backend.create_model("m", spec())
    (outcome,) = backend.run([train("m", sft(0, 9))])
    assert isinstance(outcome, OutOfMemory)
    assert lacking.attempts == [setting]


def test_a_whole_model_without_memory_is_recomputed_from_its_next_pass_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of its gradient may have been added: the pass itself fails."""
    lacking = _Lacking(monkeypatch)
    backend = make_full()
    _free(monkeypatch, 2 * 9 * _of(backend)._per_row)
    backend.create_model("m", spec(0))
    (outcome,) = backend.run([train("m", sft(0, 9))])
    assert isinstance(outcome, OutOfMemory)
    ok(backend.run([train("m", sft(0, 9))]))
    assert lacking.attempts == [False, True]


def test_the_guess_knows_the_experts_that_a_row_uses() -> None:
    attention = (48 + 64) + 2 * (48 + 32) + (64 + 48)
    experts = 2 * ((48 + 2 * 24) + (24 + 48))
    assert _of(make_backend("mixture"))._per_row == 2.0 * 4 * 2 * (attention + experts)


def test_the_weights_of_an_adapter_do_not_count_as_activations() -> None:
    def measured(rank: int) -> float:
        backend = make_backend()
        backend.create_model("m", spec(rank))
        ok(backend.run([train("m", sft(0, *LENGTHS))]))
        return _of(backend)._per_row

    low_rank = 4 * 2 * 7 * (32 - 8)
    """Bytes of a row's products with lora_A, of seven layers in each of two decoder layers."""
    assert measured(32) - measured(8) <= low_rank


def test_recomputed_layers_keep_little_more_than_their_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[int] = []
    inner = PackedModel._hidden_states

    def counted(self: PackedModel, slices: Any) -> torch.Tensor:
        with recomputation._kept_bytes([]) as found:
            hidden = inner(self, slices)
        if torch.is_grad_enabled():
            kept.append(sum(found.values()))
        return hidden

    monkeypatch.setattr(PackedModel, "_hidden_states", counted)
    for setting in (False, True):
        backend = make_backend(gradient_checkpointing=setting)
        backend.create_model("m", spec())
        ok(backend.run([train("m", sft(0, *LENGTHS))]))
    assert kept[1] < kept[0] / 5


def test_no_module_inside_a_recomputed_layer_is_in_training_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropout would change the numbers."""
    backend = make_backend(gradient_checkpointing=True)
    backend.create_model("m", spec())
    model: nn.Module = rank_of(backend).base.packed.model
    layers: list[Any] = list(rank_of(backend).base.packed.decoder_layers)
    others = [module for module in model.modules() if not isinstance(module, MultiLoraLinear)]
    training: list[nn.Module] = []
    layers[0].mlp.register_forward_hook(lambda *_: training.extend(module for module in others if module.training))
    ok(backend.run([train("m", sft(0, 9))]))
    assert training == layers, "in the forward, and not in its repetition"
    assert not any(module.training for module in others)


def test_nothing_that_is_recomputed_keeps_the_state_of_a_random_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is random, and on CUDA the state is read from the device."""
    backend = make_backend(gradient_checkpointing=True)
    backend.create_model("m", spec())
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


def test_forwards_keep_nothing_and_are_never_recomputed(monkeypatch: pytest.MonkeyPatch) -> None:
    base = rank_of(make_backend(gradient_checkpointing=True)).base
    chosen = base.packed.recomputation
    assert chosen is not None
    monkeypatch.setattr(chosen, "pays", lambda rows: pytest.fail("asked"))
    with torch.no_grad(), chosen.of_micro_batch(100):
        assert not any(layer.training for layer in base.packed.decoder_layers)
