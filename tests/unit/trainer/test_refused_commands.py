"""Passes, adapters and optimizer steps that the backend refuses. A refusal names the field, the datum and the allowed
values, and does not change the backend.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch_lora_support import CONTEXT, VOCAB, base_path, make_backend, rl, sft, spec, train

from skyrl.base.config.loading import load_config
from skyrl.base.config.several import base_models_of
from skyrl.base.types.weights import LoraSpec
from skyrl.trainer.losses import LOSSES, loss_config
from skyrl.trainer.protocol import AdamParams, Datum, InvalidRequest, TrainingPass
from skyrl.trainer.ranks.lora_backend import LoraBackend


@pytest.fixture(scope="module")
def backend() -> LoraBackend:
    made = make_backend()
    made.create_model("m", spec())
    return made


def _with(data: list[Datum], **changes: np.ndarray | None) -> list[Datum]:
    """`data` with other inputs in its last datum. None removes an input; `tokens` replaces the model input."""
    tokens = changes.pop("tokens", None)
    inputs = {**data[-1].loss_inputs, **changes}
    last = Datum(data[-1].tokens if tokens is None else tokens, {k: v for k, v in inputs.items() if v is not None})
    return [*data[:-1], last]


def _gspo(mask: np.ndarray | None) -> list[Datum]:
    return _with(rl(0, 4, 6), sequence_ratio_mask=mask)


F32, I64 = np.float32, np.int64
N = 6
IDS = np.arange(N)
REFUSALS: dict[str, tuple[Callable[[], TrainingPass], list[str]]] = {
    "no data": (lambda: train("m", []), ["data"]),
    "unknown loss": (lambda: train("m", sft(0, 4), "dpo"), ["loss_fn", "'dpo'", "cross_entropy", "gspo"]),
    "stable_reinforce": (
        lambda: train("m", rl(0, 4), "stable_reinforce"),
        ["loss_fn", "send loss_fn=ppo", "importance_sampling", 'losses.stable_reinforce = "cispo"', "not published"],
    ),
    "custom": (lambda: train("m", rl(0, 4), "custom"), ["loss_fn", "no loss 'custom'", "cross_entropy"]),
    "config key": (
        lambda: train("m", rl(0, 4), "ppo", clip=0.2),
        ["loss_fn_config", "'clip'", "clip_low_threshold", "clip_high_threshold"],
    ),
    "config key of a loss without": (
        lambda: train("m", sft(0, 4), beta=1.0),
        ["loss_fn_config", "allowed: sampling_temperature, top_p, top_k"],
    ),
    "config NaN": (lambda: train("m", rl(0, 4), "dro", beta=float("nan")), ["loss_fn_config.beta", "finite"]),
    "config negative": (lambda: train("m", rl(0, 4), "dro", beta=-1.0), ["loss_fn_config.beta"]),
    "config order": (
        lambda: train("m", rl(0, 4), "ppo", clip_low_threshold=2.0),
        ["loss_fn_config.clip_low_threshold", "clip_high_threshold"],
    ),
    "epsilon for both clip bounds": (
        lambda: train("m", rl(0, 4), "ppo", clip_low_threshold=0.2, clip_high_threshold=0.2),
        ["loss_fn_config.clip_high_threshold: 0.2 is below 1", "clip_low_threshold 0.8 and clip_high_threshold 1.2"],
    ),
    "epsilon for the high bound alone": (
        lambda: train("m", rl(0, 4), "cispo", clip_high_threshold=0.3),
        ["loss_fn_config.clip_high_threshold: 0.3 is below 1", "clip_low_threshold 0.7 and clip_high_threshold 1.3"],
    ),
    "epsilons of gspo": (
        lambda: train("m", _gspo(np.ones(N, F32)), "gspo", clip_low_threshold=3e-4, clip_high_threshold=4e-4),
        ["loss_fn_config.clip_high_threshold: 0.0004 is below 1", "0.9996 and clip_high_threshold 1.0004"],
    ),
    "low clip bound above 1": (
        lambda: train("m", rl(0, 4), "cispo", clip_low_threshold=1.2, clip_high_threshold=1.5),
        ["loss_fn_config.clip_low_threshold: 1.2 is above 1", "from 0 to 1"],
    ),
    "empty sequence": (
        lambda: train("m", _with(sft(0, 4, N), tokens=np.zeros(0, I64))),
        ["data[1]", "model_input", "at least one"],
    ),
    "too long": (
        lambda: train("m", sft(0, 4, CONTEXT + 1)),
        ["data[1]", "model_input", str(CONTEXT + 1), str(CONTEXT)],
    ),
    "token too large": (
        lambda: train("m", _with(sft(0, 4, N), tokens=IDS + VOCAB - N + 1)),
        ["data[1]", "model_input", f"token id {VOCAB}", f"[0, {VOCAB})"],
    ),
    "token negative": (lambda: train("m", _with(sft(0, N), tokens=IDS - 1)), ["data[0]", "token id -1"]),
    "float tokens": (
        lambda: train("m", _with(sft(0, N), tokens=IDS.astype(F32))),
        ["model_input", "float32"],
    ),
    "2-D tokens": (lambda: train("m", _with(sft(0, N), tokens=IDS[None])), ["model_input", "[1, 6]"]),
    "no targets": (
        lambda: train("m", _with(sft(0, N), target_tokens=None)),
        ["data[0]", "loss_fn_inputs.target_tokens", "missing"],
    ),
    "float targets": (
        lambda: train("m", _with(sft(0, 4, N), target_tokens=IDS.astype(F32))),
        ["data[1]", "loss_fn_inputs.target_tokens", "int64", "float32"],
    ),
    "target outside": (
        lambda: train("m", _with(sft(0, N), target_tokens=IDS + VOCAB)),
        ["loss_fn_inputs.target_tokens", f"token id {VOCAB}"],
    ),
    "targets too short": (
        lambda: train("m", _with(sft(0, N), target_tokens=IDS[:-1])),
        ["loss_fn_inputs.target_tokens", "N = 6", "[5]"],
    ),
    "targets without width": (
        lambda: train("m", _with(sft(0, N), target_tokens=np.zeros((N, 0), I64))),
        ["loss_fn_inputs.target_tokens", "[6, 0]"],
    ),
    "targets 0-D": (
        lambda: train("m", _with(sft(0, N), target_tokens=np.array(3))),
        ["loss_fn_inputs.target_tokens", "[]"],
    ),
    "2-D targets in RL": (
        lambda: train("m", _with(rl(0, N), target_tokens=np.zeros((N, 2), I64)), "ppo"),
        ["loss_fn_inputs.target_tokens", "[N]", "ppo"],
    ),
    "weights shape": (
        lambda: train("m", _with(sft(0, N), target_tokens=np.zeros((N, 2), I64))),
        ["loss_fn_inputs.weights", "shape of target_tokens", "[6, 2]", "[6]"],
    ),
    "weights NaN": (
        lambda: train("m", _with(sft(0, N), weights=np.full(N, np.nan, F32))),
        ["loss_fn_inputs.weights", "NaN"],
    ),
    "advantages infinite": (
        lambda: train("m", _with(rl(0, 4, N), advantages=np.full(N, np.inf, F32)), "ppo"),
        ["data[1]", "loss_fn_inputs.advantages", "infinity"],
    ),
    "logprobs missing": (
        lambda: train("m", _with(rl(0, N), logprobs=None), "cispo"),
        ["loss_fn_inputs.logprobs", "missing", "advantages"],
    ),
    "advantages length": (
        lambda: train("m", _with(rl(0, N), advantages=np.ones(N + 1, F32)), "dro"),
        ["loss_fn_inputs.advantages", "[7]"],
    ),
    "advantages of text": (
        lambda: train("m", _with(rl(0, N), advantages=np.array(["1"] * N)), "dro"),
        ["loss_fn_inputs.advantages", "float32"],
    ),
    "an input the loss ignores": (
        lambda: train("m", _with(rl(0, N), weights=np.ones(N, F32)), "importance_sampling"),
        ["loss_fn_inputs.weights", "does not use", "advantages"],
    ),
    "gspo without mask": (lambda: train("m", _gspo(None), "gspo"), ["sequence_ratio_mask", "missing"]),
    "gspo with empty mask": (
        lambda: train("m", [_gspo(np.zeros(N, F32))[-1]], "gspo"),
        ["data[0]", "loss_fn_inputs.sequence_ratio_mask", "all zero"],
    ),
    "unknown model": (lambda: train("nobody", sft(0, 4)), ["model_id", "nobody"]),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_an_invalid_pass_is_refused_with_its_field_and_the_allowed_values(backend: LoraBackend, name: str) -> None:
    make, words = REFUSALS[name]
    with pytest.raises(InvalidRequest) as refused:
        backend.check(make())
    for word in words:
        assert word in str(refused.value)


@given(st.floats(0, 1e3), st.floats(0, 1e3), st.sampled_from(["ppo", "cispo", "gspo"]))
def test_clip_bounds_are_accepted_only_if_the_ratio_1_is_between_them(low: float, high: float, name: str) -> None:
    bounds = {"clip_low_threshold": low, "clip_high_threshold": high}
    if low <= 1 <= high:
        assert loss_config(name, LOSSES[name], bounds) == bounds
    else:
        field = "clip_high_threshold" if high < 1 else "clip_low_threshold"
        with pytest.raises(InvalidRequest, match=rf"^loss_fn_config\.{field}: "):
            loss_config(name, LOSSES[name], bounds)


def test_of_several_base_models_a_refusal_of_a_token_id_names_its_own() -> None:
    student = {"base_model": base_path("qwen3"), "served_model_names": ["acme/student"]}
    config, _ = base_models_of(
        load_config({"base_models": [student, {"base_model": "acme/teacher", "uses": ["sample"]}]})
    )
    backend = LoraBackend(config)
    backend.create_model("m", spec())
    strange = train("m", _with(sft(0, N), tokens=np.array([0, 1, 2, 3, 4, VOCAB])))
    with pytest.raises(InvalidRequest) as refused:
        backend.check(strange)
    assert str(refused.value).endswith(
        f"model_input: token id {VOCAB} is outside [0, {VOCAB}), the vocabulary of 'acme/student': the id may come "
        "from another base model's tokenizer"
    )


def test_unusual_but_valid_passes_are_accepted(backend: LoraBackend) -> None:
    weightless = [Datum(d.tokens, {"target_tokens": d.loss_inputs["target_tokens"]}) for d in sft(2, 5, CONTEXT)]
    backend.check(train("m", weightless))
    backend.check(train("m", _with(rl(0, N), advantages=np.ones(N, I64)), "ppo", clip_high_threshold=2))
    for low, high in ((0.9, 1.1), (0.8, 1.28), (0.0, 4.0), (0, 1), (1.0, 1.0), (1.0, 1e6)):
        for loss in ("ppo", "cispo"):
            backend.check(train("m", rl(0, 4), loss, clip_low_threshold=low, clip_high_threshold=high))
    backend.check(train("m", _with(sft(0, N), target_tokens=np.zeros((N, 2), I64), weights=np.ones((N, 2), F32))))
    padding_only = _with(rl(0, N), advantages=np.zeros(N, F32), sequence_ratio_mask=np.zeros(N, F32))
    backend.check(train("m", padding_only, "gspo"))


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (LoraSpec(0, 32, 0), ["lora_config.rank", "full fine-tuning"]),
        (LoraSpec(-1, 32, 0), ["lora_config.rank", "1 to 32"]),
        (LoraSpec(33, 32, 0), ["lora_config.rank", "1 to 32", "33"]),
        (LoraSpec(8, 0.0, 0), ["lora_config.alpha"]),
        (LoraSpec(8, 32, 0, False, False, False), ["train_attn", "train_mlp", "train_unembed"]),
    ],
)
def test_an_invalid_adapter_is_refused(backend: LoraBackend, bad: LoraSpec, words: list[str]) -> None:
    with pytest.raises(InvalidRequest) as refused:
        backend.create_model("new", bad)
    for word in words:
        assert word in str(refused.value)
    backend.create_model("new", spec())
    backend.delete_model("new")


@pytest.mark.parametrize(
    "bad",
    [
        {"learning_rate": -1.0},
        {"learning_rate": float("nan")},
        {"learning_rate": 1e38},
        {"beta1": 1.0},
        {"beta2": -0.1},
        {"eps": 0.0},
        {"eps": 1e-50},
        {"eps": 1e38},
        {"weight_decay": float("inf")},
        {"grad_clip_norm": -1.0},
    ],
)
def test_invalid_optimizer_parameters_are_refused(backend: LoraBackend, bad: dict[str, float]) -> None:
    with pytest.raises(InvalidRequest, match=f"adam_params.{next(iter(bad))}"):
        backend.optim_step("m", AdamParams(**bad))
