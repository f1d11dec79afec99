"""A critic: advantages and value loss against NumPy formulas, gradients of head and adapter against autograd on
transformers and PEFT, and what a head changes for other adapters, files and ranks: nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from torch_lora_support import (
    assert_close,
    assert_same,
    base_path,
    files_saved,
    grpo,
    make_backend,
    ok,
    rl,
    sft,
    spec,
    stock_logprobs,
    train,
    with_returns,
    with_rewards,
)
from transformers import AutoModelForCausalLM

from skyrl.base.pictures.picture import PlacedPicture
from skyrl.trainer import critic
from skyrl.trainer.lora.adapter import Adapter, with_value_head
from skyrl.trainer.lora.linear import groups_adapters
from skyrl.trainer.losses import LOSSES, zero_at_pictures
from skyrl.trainer.protocol import AdamParams, Datum, InvalidRequest, TrainingPass
from skyrl.trainer.ranks import lora_rank
from skyrl.trainer.ranks.lora_backend import LoraBackend
from skyrl.trainer.ranks.lora_rank import groups_of
from skyrl.trainer.rows.pictures import check_picture_targets

HEAD = replace(spec(4, 11), value_head=True)
STEP = AdamParams(learning_rate=3e-3, eps=1e-2)
CONFIG = {"value_coef": 0.7, "value_clip": 0.15}
FILES = {"adapter_config.json", "adapter_model.safetensors", "optimizer.safetensors", "state.json"}


def _headed(**options: Any) -> LoraBackend:
    """A backend whose model "m" has a head that is not 0, and no gradient."""
    backend = make_backend(**options)
    backend.create_model("m", HEAD)
    ok(backend.run([train("m", with_returns(rl(5, 20, 9)), "ppo")]))
    backend.optim_step("m", AdamParams(learning_rate=1e-1))
    return backend


@pytest.mark.parametrize(("gamma", "gae_lambda"), [(1.0, 1.0), (0.9, 0.8), (1.0, 0.0), (0.7, 1.0)])
def test_advantages_and_returns_equal_the_definition(gamma: float, gae_lambda: float) -> None:
    rng = np.random.default_rng(1)
    mask = np.array([0, 0, 1, 1, 0, 1, 1, 1, 0], np.float32)  # a user's turn in the middle
    rewards, values = rng.normal(size=(2, 9)).astype(np.float32)
    advantages, returns = critic.estimate(rewards, values, mask, gamma, gae_lambda)
    at = np.flatnonzero(mask)
    r, v = rewards[at].astype(float), values[at].astype(float)
    delta = [r[t] + gamma * (v[t + 1] if t + 1 < len(at) else 0) - v[t] for t in range(len(at))]
    expected = [
        sum((gamma * gae_lambda) ** (later - t) * delta[later] for later in range(t, len(at))) for t in range(len(at))
    ]
    np.testing.assert_allclose(advantages[at], expected, rtol=1e-6)
    np.testing.assert_allclose(returns[at], expected + v, rtol=1e-6)
    assert not advantages[mask == 0].any()
    assert not returns[mask == 0].any()
    if gae_lambda == 1:
        sums = [sum(gamma ** (later - t) * r[later] for later in range(t, len(at))) for t in range(len(at))]
        np.testing.assert_allclose(returns[at], sums, rtol=1e-5)


def test_a_sequence_without_chosen_tokens_has_no_advantages() -> None:
    nothing = np.zeros(3, np.float32)
    assert not np.any(critic.estimate(nothing, nothing + 1, nothing, 1.0, 0.95))


def _value_loss(v: np.ndarray, old: np.ndarray, r: np.ndarray, mask: np.ndarray, e: float) -> np.ndarray:
    clipped = np.clip(v, old - e, old + e)
    return np.where(mask != 0, 0.5 * np.maximum((v - r) ** 2, (clipped - r) ** 2), 0)


def test_value_loss_and_gradient_equal_the_formula() -> None:
    rng = np.random.default_rng(2)
    v, old, r = rng.normal(size=(3, 200)) * 0.3
    mask = (rng.random(200) < 0.8).astype(float)
    inputs = {name: torch.from_numpy(each) for name, each in (("values", old), ("returns", r), ("mask", mask))}
    leaf = torch.from_numpy(v.copy()).requires_grad_()
    terms, clipped = critic.value_loss(leaf, inputs, {"value_clip": 0.2})
    np.testing.assert_allclose(terms.detach(), _value_loss(v, old, r, mask, 0.2), rtol=1e-12)
    (gradient,) = torch.autograd.grad(terms.sum(), leaf)
    slope = (_value_loss(v + 1e-6, old, r, mask, 0.2) - _value_loss(v - 1e-6, old, r, mask, 0.2)) / 2e-6
    np.testing.assert_allclose(gradient, slope, atol=1e-6)
    assert 0 < clipped.sum() < 200
    assert not gradient[clipped].any()


def _peft(backend: LoraBackend, directory: Path) -> Any:
    directory.mkdir()
    backend.save_adapter("m", directory)
    model = AutoModelForCausalLM.from_pretrained(base_path(), attn_implementation="eager").eval()
    return PeftModel.from_pretrained(model, str(directory), is_trainable=True).eval()


def _stock_values(model: Any, datum: Datum, head: dict[str, Tensor]) -> Tensor:
    ids = torch.from_numpy(datum.tokens)[None]
    hidden = model.get_base_model().model(input_ids=ids, use_cache=False).last_hidden_state[0]
    return hidden @ head["value_head.weight"][0] + head["value_head.bias"]


@pytest.mark.parametrize("rewarded", [False, True], ids=["returns", "rewards"])
def test_values_loss_and_gradients_equal_autograd_on_peft(tmp_path: Path, *, rewarded: bool) -> None:
    """Shared prompts, packed rows, several slices, and a sequence that has no advantage but a value loss."""
    backend = _headed(micro_batch_tokens=60)
    data = [*grpo(1, 2, 3, 12), *rl(2, 25, 31)]
    if not rewarded:
        data[0].loss_inputs["advantages"] = np.zeros_like(data[0].loss_inputs["advantages"])
    data = with_rewards(data) if rewarded else with_returns(data)
    if not rewarded:
        data[0].loss_inputs["mask"][-1] = 1
    files_saved(backend, "m", tmp_path / "before")
    head = {name: each.requires_grad_() for name, each in load_file(tmp_path / "before/value_head.safetensors").items()}
    model = _peft(backend, tmp_path / "peft")
    config = CONFIG | ({"gamma": 0.95, "gae_lambda": 0.9} if rewarded else {})
    (result,) = ok(backend.run([train("m", data, "ppo", **config)]))
    assert result.values is not None
    total, of_values, counted = torch.zeros(()), 0.0, 0.0
    for datum, values in zip(data, result.values, strict=True):
        x = dict(datum.loss_inputs)
        if rewarded:
            x["advantages"], x["returns"] = critic.estimate(x["rewards"], x["values"], x["mask"], 0.95, 0.9)
        own = _stock_values(model, datum, head)
        np.testing.assert_allclose(values, own.detach(), atol=2e-5)
        a, q, old, r, mask = (
            torch.from_numpy(x[name]) for name in ("advantages", "logprobs", "values", "returns", "mask")
        )
        ratio = torch.where(a != 0, stock_logprobs(model, datum) - q, 0).exp()
        policy = torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a)
        bounded = old + (own - old).clamp(-0.15, 0.15)
        critics = 0.5 * torch.maximum((own - r) ** 2, (bounded - r) ** 2) * mask
        total = total - policy.sum() + 0.7 * critics.sum()
        of_values, counted = of_values + float(critics.detach().sum()), counted + float(mask.sum())
    total.backward()
    metrics = result.metrics
    assert metrics["loss:sum"] == pytest.approx(float(total.detach()), rel=1e-4)
    assert metrics["value_loss:sum"] == pytest.approx(of_values, rel=1e-4)
    assert metrics["value_tokens:sum"] == counted
    assert metrics["value_loss:mean"] == pytest.approx(of_values / counted, rel=1e-4)
    assert 0 < metrics["value_clipped:sum"] < counted
    assert metrics["value_clip_fraction:mean"] == pytest.approx(metrics["value_clipped:sum"] / counted)
    ours = files_saved(backend, "m", tmp_path / "after")
    theirs: dict[str, Any] = {
        name.removeprefix("base_model.model.").replace(".default.weight", ""): each.grad
        for name, each in model.named_parameters()
        if each.requires_grad
    } | {name: each.grad for name, each in head.items()}
    gradients = {name.removeprefix("gradient."): each for name, each in ours.items() if name.startswith("gradient.")}
    assert_close(gradients, theirs, 2e-4)


def test_values_start_at_0_and_come_with_every_pass_of_a_model_with_a_head() -> None:
    backend = make_backend()
    backend.create_model("m", HEAD)
    backend.create_model("plain", replace(HEAD, value_head=False))
    data = sft(0, 9, 4)
    headed, plain = ok(
        backend.run([TrainingPass(name, data, "cross_entropy", backward=False) for name in ("m", "plain")])
    )
    assert plain.values is None
    assert headed.values is not None
    assert [each.tolist() for each in headed.values] == [[0.0] * 9, [0.0] * 4]
    for one, other in zip(headed.logprobs, plain.logprobs, strict=True):
        np.testing.assert_array_equal(one, other)
    assert "value_loss:sum" not in headed.metrics


def test_training_on_returns_brings_values_towards_them() -> None:
    backend = make_backend()
    backend.create_model("m", HEAD)
    data = with_returns(rl(3, 20, 15))
    found: list[float] = []
    for _ in range(12):
        (result,) = ok(backend.run([train("m", data, "importance_sampling", value_coef=1.0, value_clip=10.0)]))
        backend.optim_step("m", AdamParams(learning_rate=1e-2))
        found.append(result.metrics["value_loss:mean"])
    assert found[-1] < 0.2 * found[0]


@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.parametrize("stacked", [False, True])
def test_two_tenants_in_one_call_get_what_each_gets_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, merge: bool, stacked: bool
) -> None:
    """To the last bit where their rows are apart. `stacked`: adapters are updated together, as on a GPU."""
    if stacked:
        monkeypatch.setattr(lora_rank, "groups_adapters", lambda _: True)
    assert not groups_adapters(torch.device("cpu"))
    names = {"head": HEAD, "plain": spec(8, 2), "other": spec(4, 3)}
    passes = [
        train("plain", rl(1, 9, 14), "ppo"),
        train("head", with_returns(grpo(2, 1, 3, 8)), "ppo", **CONFIG),
        train("head", with_returns(grpo(2, 1, 3, 8), 1), "ppo", **CONFIG),
        train("other", sft(3, 11)),
    ]
    runs = []
    for alone in (True, False):
        backend = make_backend(merge=merge)
        for name, each in names.items():
            backend.create_model(name, each)
        groups = [[each] for each in passes] if alone else [passes]
        results = [result for group in groups for result in ok(backend.run(group))]
        for name in names:
            backend.optim_step(name, STEP)
        runs.append((results, {name: files_saved(backend, name, tmp_path / f"{alone}-{name}") for name in names}))
    (alone, alone_saved), (together, together_saved) = runs
    compare = assert_same if not merge else lambda one, other: assert_close(one, other, 1e-4)
    for name in names:
        compare(together_saved[name], alone_saved[name])
    for one, other in zip(together, alone, strict=True):
        assert one.metrics.keys() == other.metrics.keys()
        assert (one.values is None) == (other.values is None)
        for own, expected in zip(one.values or [], other.values or [], strict=True):
            np.testing.assert_allclose(own, expected, atol=1e-5 if merge else 0)


def test_an_adapter_with_a_head_is_updated_alone_and_draws_what_one_without_draws() -> None:
    (target,) = [each for each in make_backend()._targets if each.name == "lm_head"]
    device = torch.device("cpu")
    plain = Adapter(spec(8, 2), [target], device)
    headed = Adapter(replace(spec(8, 2), value_head=True), with_value_head([target], 48), device)
    assert groups_of([plain, headed, plain]) == [0, None, 0]
    assert torch.equal(headed.weights[: plain.numel], plain.weights)
    assert headed.weights[plain.numel :].tolist() == [0.0] * 49
    leaves = headed.leaves(True, torch.bfloat16)
    assert [each.dtype for each in leaves["value_head"]] == [torch.float32] * 2
    assert [each.dtype for each in leaves["lm_head"]] == [torch.bfloat16] * 2


@pytest.mark.parametrize("optimizer", [True, False])
def test_a_head_is_saved_loaded_and_restored(tmp_path: Path, *, optimizer: bool) -> None:
    backend = _headed()
    data = with_returns(rl(6, 18, 7))
    ok(backend.run([train("m", data, "ppo")]))
    saved = files_saved(backend, "m", tmp_path / "saved")
    assert {each.name for each in (tmp_path / "saved").iterdir()} == FILES | {"value_head.safetensors"}
    assert saved["value_head.weight"].abs().sum() > 0
    assert saved["exp_avg.value_head.bias"].abs().sum() > 0
    backend.create_model("other", HEAD)
    backend.load_state("other", tmp_path / "saved", optimizer=optimizer)
    loaded = files_saved(backend, "other", tmp_path / "loaded")
    parts = ("exp_avg", "exp_avg_sq", "gradient")
    assert_same(
        loaded, saved if optimizer else {name: each for name, each in saved.items() if not name.startswith(parts)}
    )
    restored = make_backend()
    restored.restore_model("m", HEAD, tmp_path / "saved")
    assert_same(files_saved(restored, "m", tmp_path / "restored"), saved)
    one, other = (ok(each.run([train("m", data, "ppo")]))[0] for each in (backend, restored))
    assert one.metrics == other.metrics


def test_what_samplers_and_peft_load_has_no_head(tmp_path: Path) -> None:
    backend = _headed()
    for directory, save in ((tmp_path / "a", backend.save_adapter), (tmp_path / "b", backend.save_state)):
        directory.mkdir()
        save("m", directory)
        assert not [name for name in load_file(directory / "adapter_model.safetensors") if "value" in name]
        assert "value" not in (directory / "adapter_config.json").read_text()
    assert {each.name for each in (tmp_path / "a").iterdir()} == FILES - {"optimizer.safetensors", "state.json"}


def test_an_adapter_may_have_a_head_and_other_ranks_in_some_layers(tmp_path: Path) -> None:
    ranked = replace(HEAD, rank_pattern=(("q_proj", 2),))
    backend = make_backend()
    backend.create_model("m", ranked)
    data = with_returns(rl(5, 20, 9))
    ok(backend.run([train("m", data, "ppo")]))
    backend.optim_step("m", STEP)
    saved = files_saved(backend, "m", tmp_path / "saved")
    written = json.loads((tmp_path / "saved" / "adapter_config.json").read_text())["rank_pattern"]
    assert set(written.values()) == {2}
    assert "value" not in str(written)
    restored = make_backend()
    restored.restore_model("m", ranked, tmp_path / "saved")
    assert_same(files_saved(restored, "m", tmp_path / "restored"), saved)
    with pytest.raises(InvalidRequest, match="'value_head' matches no trained layer"):
        backend.create_model("other", replace(HEAD, rank_pattern=(("value_head", 2),)))


def test_a_critic_may_begin_with_an_adapter_that_has_none(tmp_path: Path) -> None:
    backend = make_backend()
    backend.create_model("plain", replace(HEAD, value_head=False))
    ok(backend.run([train("plain", sft(0, 20))]))
    backend.optim_step("plain", STEP)
    plain = files_saved(backend, "plain", tmp_path / "plain")
    backend = _headed()
    with pytest.raises(InvalidRequest, match="^optimizer: must be false: this model has a value head"):
        backend.load_state("m", tmp_path / "plain", optimizer=True)
    backend.load_state("m", tmp_path / "plain", optimizer=False)
    loaded = files_saved(backend, "m", tmp_path / "loaded")
    assert not loaded.pop("value_head.weight").any()
    assert not loaded.pop("value_head.bias").any()
    assert_same(loaded, {name: each for name, each in plain.items() if name.startswith("base_model")})
    backend.create_model("plain", replace(HEAD, value_head=False))
    with pytest.raises(InvalidRequest, match=r"^path: the saved adapter has a value head.*user_metadata"):
        backend.load_state("plain", tmp_path / "loaded", optimizer=False)


def test_clipping_the_gradient_counts_the_head(tmp_path: Path) -> None:
    backend = _headed()
    ok(backend.run([train("m", with_returns(rl(6, 18)), "ppo", value_coef=100.0)]))
    saved = files_saved(backend, "m", tmp_path / "saved")
    flat = torch.cat([each.flatten() for name, each in saved.items() if name.startswith("gradient.")])
    of_head = saved["gradient.value_head.weight"].norm()
    assert backend.optim_step("m", STEP)["grad_norm"] == pytest.approx(float(flat.norm()), rel=1e-5)
    assert of_head > 0.1 * flat.norm()


def _without(name: str) -> list[Datum]:
    data = with_returns(rl(0, 9))
    del data[0].loss_inputs[name]
    return data


def _changed(name: str, array: Any, make: Any = with_returns) -> list[Datum]:
    data = make(rl(0, 9))
    data[0].loss_inputs[name] = np.asarray(array, np.float32)
    return data


NINE = np.ones(9, np.float32)
REFUSED: list[tuple[str, list[Datum], str, dict[str, float], str]] = [
    ("m", _without("values"), "ppo", {}, r"loss_fn_inputs.values: missing; ppo needs"),
    ("m", _without("mask"), "ppo", {}, r"loss_fn_inputs.mask: missing"),
    ("m", _without("returns"), "ppo", {}, r"loss_fn_inputs.returns: missing"),
    ("m", _without("advantages"), "ppo", {}, r"loss_fn_inputs.advantages: missing"),
    ("m", [*with_returns(rl(0, 9)), *rl(1, 5)], "ppo", {}, r"data\[1\]: loss_fn_inputs.values: missing"),
    ("m", _changed("mask", NINE / 2), "ppo", {}, r"loss_fn_inputs.mask: must be 0 or 1"),
    ("m", _changed("returns", NINE[:4]), "ppo", {}, r"loss_fn_inputs.returns: must have the shape"),
    ("m", _changed("values", NINE * np.nan), "ppo", {}, r"loss_fn_inputs.values: holds NaN"),
    ("m", _changed("rewards", NINE), "ppo", {}, r"loss_fn_inputs.advantages: ppo does not use it"),
    ("m", _changed("rewards", NINE, with_rewards), "ppo", {}, r"rewards: must be 0 where mask is 0.*position 0"),
    ("m", with_rewards(rl(0, 9)), "ppo", {"gamma": 1.5}, r"loss_fn_config.gamma: must be from 0 to 1"),
    ("m", with_returns(rl(0, 9)), "ppo", {"gae_lambda": 1.0}, r"ppo has no key 'gae_lambda'"),
    ("m", with_returns(rl(0, 9)), "ppo", {"value_clip": 0.0}, r"value_clip: must be above 0"),
    ("m", rl(0, 9), "ppo", {"value_coef": 1.0}, r"ppo has no key 'value_coef'"),
    ("m", with_returns(rl(0, 9)), "dro", {}, r"loss_fn_inputs.(values|returns|mask): dro does not use it"),
    ("plain", with_returns(rl(0, 9)), "ppo", {}, r"values, returns, mask need a value head.*user_metadata"),
    ("plain", with_rewards(rl(0, 9)), "ppo", {}, r"values, rewards, mask need a value head"),
    ("plain", _changed("mask", NINE, lambda data: data), "ppo", {}, r"loss_fn_inputs.mask: ppo does not use it"),
]


@pytest.mark.parametrize(("model", "data", "loss_fn", "config", "message"), REFUSED)
def test_a_pass_that_cannot_be_right_is_refused(
    backend: LoraBackend, model: str, data: list[Datum], loss_fn: str, config: dict[str, float], message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        backend.check(train(model, data, loss_fn, **config))


@pytest.fixture(scope="module")
def backend() -> LoraBackend:
    made = make_backend()
    made.create_model("m", HEAD)
    made.create_model("plain", spec())
    return made


def test_a_mask_is_0_at_pictures() -> None:
    """Values and returns may be anything there."""
    (datum,) = with_returns(rl(0, 9))
    datum.loss_inputs["advantages"][:] = 0
    pictured = replace(datum, pictures=(PlacedPicture(4, 3, "0" * 64, "png"),))
    datum.loss_inputs["mask"][:] = 0
    names = zero_at_pictures(LOSSES["ppo"].of([pictured]))
    assert names == ["advantages", "mask"]
    check_picture_targets(pictured, names)
    datum.loss_inputs["mask"][4] = 1
    with pytest.raises(InvalidRequest, match=r"loss_fn_inputs.mask: must be 0 at position 4"):
        check_picture_targets(pictured, names)
