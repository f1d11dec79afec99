"""The torch backend as the engine uses it: construction, passes, optimizer steps, and failures of single passes."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch_lora_support import (
    CONTEXT,
    VOCAB,
    assert_close,
    assert_same,
    base_path,
    make_backend,
    ok,
    rl,
    saved,
    sft,
    spec,
    train,
)
from transformers import AutoConfig, AutoModelForCausalLM

from skyrl.base.config.loading import load_config
from skyrl.base.config.server import ConfigError
from skyrl.engine.main import _load_backend
from skyrl.runtime.processes.startup import NotLoaded
from skyrl.trainer import create_backend, device
from skyrl.trainer.adamw import NonFiniteGradient
from skyrl.trainer.losses import LOSSES, Loss, LossInputs, LossValue
from skyrl.trainer.protocol import AdamParams, Datum, InvalidRequest, OutOfMemory, PassResult, TrainingPass


def test_the_known_backend_is_built_and_others_are_refused() -> None:
    config = load_config({"base_model": base_path()})
    backend = create_backend(config)
    assert (backend.limits.vocab_size, backend.limits.max_context) == (VOCAB, CONTEXT)
    backend.close()
    for name in ("megatron", "none"):
        with pytest.raises(ConfigError, match=f"no training backend '{name}'; there are: fsdp"):
            create_backend(config.model_copy(update={"backend": name}))


def test_the_context_is_the_smaller_of_the_models_and_the_configured_length() -> None:
    for max_model_len, expected in ((64, 64), (10_000, CONTEXT)):
        settings = {"generator.inference_engine.max_model_len": max_model_len}
        backend = create_backend(load_config({"base_model": base_path(), "backend_config": settings}))
        assert backend.limits.max_context == expected


def test_base_models_that_cannot_be_trained_are_refused(tmp_path: Path) -> None:
    small = {"vocab_size": 31, "bos_token_id": None, "eos_token_id": None}
    fused = AutoConfig.for_model("gpt2", n_embd=16, n_layer=1, n_head=2, n_positions=32, **small)
    path = tmp_path / "gpt2"
    AutoModelForCausalLM.from_config(fused).save_pretrained(path)
    with pytest.raises(ConfigError, match="no linear layers of a known name"):
        create_backend(load_config({"base_model": str(path)}))
    with pytest.raises(ConfigError, match="base_model: cannot load"):
        create_backend(load_config({"base_model": str(tmp_path)}))


def test_missing_model_files_allow_another_start_and_a_bad_config_does_not(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((Path(base_path()) / "config.json").read_bytes())
    with pytest.raises(NotLoaded, match=f"^base_model: cannot load {tmp_path}: .*no file named model.safetensors"):
        _load_backend(load_config({"base_model": str(tmp_path)}))
    (tmp_path / "config.json").write_text('{"model_type": "of no kind"}')
    with pytest.raises(ConfigError, match=f"^base_model: cannot load {tmp_path}: .*of no kind"):
        _load_backend(load_config({"base_model": str(tmp_path)}))


def test_a_device_that_breaks_while_the_model_is_loaded_allows_another_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(where: torch.device) -> None:
        raise RuntimeError("CUDA error: unspecified launch failure")

    monkeypatch.setattr(device, "synchronize", broken)
    with pytest.raises(NotLoaded, match="DeviceFault: cpu cannot be used any more: CUDA error"):
        _load_backend(load_config({"base_model": base_path()}))


def test_supervised_training_lowers_the_loss() -> None:
    backend = make_backend()
    backend.create_model("m", spec(8))
    data = [Datum(d.tokens, {"target_tokens": d.loss_inputs["target_tokens"]}) for d in sft(0, 20, 31, 8)]
    losses = []
    for _ in range(25):
        losses += [r.metrics["loss:sum"] for r in ok(backend.run([train("m", data)]))]
        backend.optim_step("m", AdamParams(learning_rate=1e-2))
    assert losses[0] == pytest.approx(59 * math.log(VOCAB), rel=0.5)
    assert losses[-1] < 0.1 * losses[0]


def test_policy_gradient_moves_probability_towards_advantage() -> None:
    backend = make_backend()
    backend.create_model("m", spec(8))
    (before,) = ok(backend.run([TrainingPass("m", sft(0, 30), "cross_entropy", backward=False)]))
    advantages = np.where(np.arange(30) % 2, 1, -1).astype(np.float32)
    datum = sft(0, 30)[0]
    inputs = {"target_tokens": datum.loss_inputs["target_tokens"], "advantages": advantages}
    for loss_fn in (name for name, loss in LOSSES.items() if "advantages" in loss.required):
        extra = {"logprobs": before.logprobs[0]}
        if loss_fn == "gspo":
            extra["sequence_ratio_mask"] = np.ones(30, np.float32)
        backend.create_model(loss_fn, spec(8))
        (first,) = ok(backend.run([train(loss_fn, [Datum(datum.tokens, inputs | extra)], loss_fn)]))
        assert first.metrics["ratio:mean"] == pytest.approx(1, abs=1e-3)
        assert first.metrics["kl:mean"] == pytest.approx(0, abs=1e-4)
        backend.optim_step(loss_fn, AdamParams(learning_rate=3e-3))
        (after,) = ok(backend.run([TrainingPass(loss_fn, [datum], "cross_entropy", backward=False)]))
        moved = after.logprobs[0] - before.logprobs[0]
        assert (moved * advantages).sum() > 0.5, loss_fn


def test_gradients_of_passes_are_summed_and_an_optimizer_step_clears_them(tmp_path: Path) -> None:
    data = sft(0, 12, 30, 7)
    whole, parts = make_backend(), make_backend()
    for backend in (whole, parts):
        backend.create_model("m", spec())
    ok(whole.run([train("m", data)]))
    ok(parts.run([train("m", [datum]) for datum in data]))
    assert_close(saved(whole, "m", tmp_path / "w"), saved(parts, "m", tmp_path / "p"), 1e-5)
    whole.optim_step("m", AdamParams())
    state = saved(whole, "m", tmp_path / "stepped")
    assert not any(name.startswith("gradient.") for name in state)
    assert whole.optim_step("m", AdamParams()) == {}
    assert_same(state, saved(whole, "m", tmp_path / "again"))


def test_a_forward_pass_leaves_no_gradient_and_equals_the_training_pass() -> None:
    backend = make_backend()
    backend.create_model("m", spec())
    data = rl(0, 12, 30)
    (forward,) = ok(backend.run([TrainingPass("m", data, "ppo", backward=False)]))
    assert backend.optim_step("m", AdamParams()) == {}
    (training,) = ok(backend.run([train("m", data, "ppo")]))
    assert forward.metrics == training.metrics
    for one, other in zip(forward.logprobs, training.logprobs, strict=True):
        assert np.array_equal(one, other)


def test_k_targets_per_position_equal_k_passes(tmp_path: Path) -> None:
    """Targets of shape [N, K], where K differs between datums, give the logprobs and gradients of K passes with targets
    of shape [N]."""
    rng = np.random.default_rng(0)
    data, columns = [], []
    for datum, width in zip(sft(0, 9, 14, 5), (3, 1, 2), strict=True):
        length = len(datum.tokens)
        targets = rng.integers(0, VOCAB, (length, width))
        weights = rng.normal(size=(length, width)).astype(np.float32)
        data.append(Datum(datum.tokens, {"target_tokens": targets, "weights": weights}))
        pairs = zip(targets.T, weights.T, strict=True)
        columns.append([Datum(datum.tokens, {"target_tokens": ids, "weights": row}) for ids, row in pairs])
    wide, narrow = make_backend(), make_backend()
    for backend in (wide, narrow):
        backend.create_model("m", spec())
    (result,) = ok(wide.run([train("m", data)]))
    for datum, logprobs, own in zip(data, result.logprobs, columns, strict=True):
        assert logprobs.shape == datum.loss_inputs["target_tokens"].shape
        (apart,) = ok(narrow.run([train("m", own)]))
        np.testing.assert_allclose(logprobs, np.stack(apart.logprobs, axis=1), atol=1e-5)
    assert_close(saved(wide, "m", tmp_path / "w"), saved(narrow, "m", tmp_path / "n"), 1e-5)


def test_each_loss_gives_its_metrics_named_with_a_reduction() -> None:
    backend = make_backend()
    backend.create_model("m", spec())
    expected = {"loss:sum", "num_tokens:sum", "computed_tokens:sum"}
    ratio = expected | {"ratio:mean", "ratio:max", "kl:mean"}
    for loss_fn, names in {
        "cross_entropy": expected,
        "importance_sampling": ratio,
        "dro": ratio,
        "ppo": ratio | {"clip_fraction:mean"},
        "cispo": ratio | {"clip_fraction:mean"},
    }.items():
        data = (sft if loss_fn == "cross_entropy" else rl)(0, 8, 5)
        (result,) = ok(backend.run([train("m", data, loss_fn)]))
        assert set(result.metrics) == names
        assert result.metrics["num_tokens:sum"] == 13
        assert all(type(value) is float and math.isfinite(value) for value in result.metrics.values())
        assert all(name.count(":") == 1 and name.split(":")[1] in {"sum", "min", "max", "mean"} for name in names)


def test_an_overflowing_loss_fails_only_its_own_pass(tmp_path: Path) -> None:
    """The first slice of the pass (30 tokens) is finite, the second overflows."""
    overflowing = rl(0, 30, 9)
    overflowing[1].loss_inputs["logprobs"][:] = -500
    for merge in (False, True):
        backend, reference = (make_backend(micro_batch_tokens=32, merge=merge) for _ in range(2))
        for one in (backend, reference):
            one.create_model("m", spec())
            one.create_model("other", spec(4))
        good = [train("m", sft(1, 9)), train("other", sft(2, 12))]
        first, failed, second = backend.run([good[0], train("m", overflowing, "importance_sampling"), good[1]])
        assert isinstance(failed, InvalidRequest)
        assert "importance_sampling is" in str(failed)
        assert isinstance(first, PassResult)
        assert isinstance(second, PassResult)
        ok([*reference.run([good[0]]), *reference.run([good[1]])])
        for model_id in ("m", "other"):
            state = saved(backend, model_id, tmp_path / f"{merge}-b-{model_id}")
            assert_close(
                state, saved(reference, model_id, tmp_path / f"{merge}-c-{model_id}"), 0 if not merge else 1e-5
            )


def test_a_pass_that_raises_fails_alone_in_a_shared_micro_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def out_of_memory(lp: Tensor, inputs: LossInputs, config: object) -> LossValue:
        raise torch.OutOfMemoryError("no memory left")

    monkeypatch.setitem(LOSSES, "exhausting", Loss(out_of_memory))
    plain = [Datum(d.tokens, {"target_tokens": d.loss_inputs["target_tokens"]}) for d in sft(0, 9)]
    backend, reference = make_backend(merge=True), make_backend()
    for one in (backend, reference):
        one.create_model("a", spec())
        one.create_model("b", spec(4))
    first, failed, second = backend.run(
        [train("a", sft(1, 9)), train("a", plain, "exhausting"), train("b", sft(2, 12))]
    )
    assert isinstance(first, PassResult)
    assert isinstance(failed, OutOfMemory)
    assert isinstance(second, PassResult)
    ok(reference.run([train("a", sft(1, 9)), train("b", sft(2, 12))]))
    for model_id in ("a", "b"):
        assert_same(
            saved(backend, model_id, tmp_path / model_id), saved(reference, model_id, tmp_path / f"c{model_id}")
        )


def test_an_optimizer_step_with_a_non_finite_gradient_raises_and_keeps_the_weights(tmp_path: Path) -> None:
    """The loss of the pass is finite; its gradient exceeds the range of float32."""
    backend = make_backend()
    backend.create_model("m", spec())
    ok(backend.run([train("m", sft(0, 9))]))
    backend.optim_step("m", AdamParams(learning_rate=1e-2))
    before = saved(backend, "m", tmp_path / "before")
    datum = sft(0, 4)[0]
    inputs = {"target_tokens": datum.loss_inputs["target_tokens"], "weights": np.full(4, 1e37, np.float32)}
    huge = Datum(datum.tokens, inputs)
    ok(backend.run([train("m", [huge])]))
    with pytest.raises(NonFiniteGradient, match="weights were not changed"):
        backend.optim_step("m", AdamParams())
    assert_same(before, saved(backend, "m", tmp_path / "after"))
    assert backend.optim_step("m", AdamParams()) == {}


def test_a_deleted_model_leaves_no_gradient_to_a_new_one_of_its_name() -> None:
    backend = make_backend()
    backend.create_model("m", spec(seed=1))
    ok(backend.run([train("m", sft(0, 9))]))
    backend.delete_model("m")
    (outcome,) = backend.run([train("m", sft(0, 9))])
    assert isinstance(outcome, InvalidRequest)
    backend.create_model("m", spec(4))
    assert backend.optim_step("m", AdamParams()) == {}


def test_stable_reinforce_served_as_cispo_gives_the_results_of_cispo_and_a_metric(tmp_path: Path) -> None:
    backend = make_backend(losses={"stable_reinforce": "cispo"})
    backend.create_model("stable", spec(seed=1))
    backend.create_model("cispo", spec(seed=1))
    passes = [train("stable", rl(0, 9), "stable_reinforce"), train("cispo", rl(0, 9), "cispo")]
    stable_reinforce, cispo = ok(backend.run(passes))
    assert stable_reinforce.metrics == cispo.metrics | {"stable_reinforce_is_cispo:max": 1.0}
    assert_same(saved(backend, "stable", tmp_path / "stable"), saved(backend, "cispo", tmp_path / "cispo"))


def test_stable_reinforce_served_as_cispo_refuses_other_configuration_keys() -> None:
    backend = make_backend(losses={"stable_reinforce": "cispo"})
    backend.create_model("m", spec())
    with pytest.raises(InvalidRequest, match="kl_coeff"):
        backend.check(train("m", rl(0, 9), "stable_reinforce", kl_coeff=0.1))
