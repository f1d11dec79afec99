"""What only adapters promise: the steps of PEFT, what their files hold, metrics, and neighbours in a micro-batch."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch_lora_support import (
    VOCAB,
    assert_close,
    assert_same,
    base_path,
    grpo,
    make_backend,
    ok,
    rl,
    saved,
    sft,
    spec,
    stock_logprobs,
    stock_terms,
    train,
)
from trainer_kinds import STEP
from transformers import AutoModelForCausalLM

from skyrl.base.types.weights import LoraSpec
from skyrl.trainer.protocol import AdamParams, Datum, InvalidRequest, TrainingPass
from skyrl.trainer.ranks.lora_backend import LoraBackend

# PEFT warns about an adapter on a tied lm_head. The adapters of this backend do not change the embeddings.
pytestmark = pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
LENGTHS = (7, 31, 1, 18, 30)


def _stock(architecture: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(base_path(architecture), attn_implementation="eager").eval()


def _peft(architecture: str, directory: Path, *, trainable: bool) -> Any:
    return PeftModel.from_pretrained(_stock(architecture), str(directory), is_trainable=trainable).eval()


def _export(backend: LoraBackend, directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    backend.save_adapter("m", directory)
    return directory


def _trained(architecture: str = "qwen3", **flags: bool) -> LoraBackend:
    """A backend whose model "m" has made a step, so that lora_B is not 0, and has a pending gradient."""
    backend = make_backend(architecture)
    backend.create_model("m", spec(8, 5, **flags))
    ok(backend.run([train("m", sft(0, *LENGTHS))]))
    backend.optim_step("m", AdamParams(learning_rate=1e-2))
    ok(backend.run([train("m", sft(1, *LENGTHS))]))
    return backend


@pytest.mark.parametrize(
    ("architecture", "loss_fn", "params"),
    [
        ("qwen3", "cross_entropy", AdamParams(3e-3, weight_decay=0.1, grad_clip_norm=0.5, eps=1e-8)),
        ("qwen3", "importance_sampling", AdamParams(3e-3, beta1=0.8, beta2=0.99, eps=1e-8)),
        ("qwen3-tied", "cross_entropy", AdamParams(3e-3, eps=1e-8)),
        ("qwen2", "cross_entropy", AdamParams(3e-3, eps=1e-8)),
        ("llama", "cross_entropy", AdamParams(3e-3, weight_decay=0.01, eps=1e-8)),
        ("qwen2-window", "importance_sampling", AdamParams(3e-3, grad_clip_norm=0.1, eps=1e-8)),
    ],
    ids=str,
)
def test_training_equals_peft_and_torch_adamw(
    tmp_path: Path, architecture: str, loss_fn: str, params: AdamParams
) -> None:
    """The first logprobs are the base model's."""
    backend = make_backend(architecture, micro_batch_tokens=50)
    backend.create_model("m", spec(4, 11))
    model = _peft(architecture, _export(backend, tmp_path / "start"), trainable=True)
    trainable = {name: value for name, value in model.named_parameters() if value.requires_grad}
    optimizer = torch.optim.AdamW(
        list(trainable.values()),
        lr=params.learning_rate,
        betas=(params.beta1, params.beta2),
        eps=params.eps,
        weight_decay=params.weight_decay,
    )
    for step in range(4):
        data = (sft if loss_fn == "cross_entropy" else rl)(step, *LENGTHS)
        (result,) = ok(backend.run([train("m", data, loss_fn)]))
        loss = torch.zeros(())
        for datum, logprobs in zip(data, result.logprobs, strict=True):
            lp = stock_logprobs(model, datum)
            np.testing.assert_allclose(logprobs, lp.detach(), atol=5e-5)
            loss = loss + stock_terms(lp, datum).sum()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trainable.values(), params.grad_clip_norm or float("inf"))
        optimizer.step()
        optimizer.zero_grad()
        assert result.metrics["loss:sum"] == pytest.approx(float(loss.detach()), rel=1e-4, abs=1e-3)
        assert backend.optim_step("m", params) == {
            "grad_norm": pytest.approx(float(norm), rel=1e-4),
            "optimizer_step": step + 1,
            "learning_rate": params.learning_rate,
        }
    ours = load_file(_export(backend, tmp_path / "end") / "adapter_model.safetensors")
    theirs = {name.replace(".default", ""): value.detach() for name, value in trainable.items()}
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], atol=1e-5, rtol=1e-5)


def test_pefts_own_merge_changes_tied_embeddings_and_one_of_an_untied_model_does_not(tmp_path: Path) -> None:
    """docs/how-it-works/checkpoints.md has this way to merge. PEFT 0.21 adds the update of a tied lm_head to the
    weights that are the embedding, too."""
    adapter, data = _export(_trained("qwen3-tied"), tmp_path / "adapter"), sft(8, *LENGTHS)

    def distance(merged: Any) -> float:
        """The largest from the adapter's logprobs, in nats."""
        right = _peft("qwen3-tied", adapter, trainable=False)
        return max(
            float((stock_logprobs(merged, each) - stock_logprobs(right, each)).detach().abs().max()) for each in data
        )

    with pytest.warns(UserWarning, match="Model with `tie_word_embeddings=True`"):
        wrong = _peft("qwen3-tied", adapter, trainable=False).merge_and_unload()
    assert distance(wrong) > 0.02
    base = _stock("qwen3-tied")
    base.lm_head.weight = torch.nn.Parameter(base.lm_head.weight.detach().clone())
    base.config.tie_word_embeddings = False
    merged = PeftModel.from_pretrained(base, str(adapter)).merge_and_unload().eval()
    merged.save_pretrained(tmp_path / "merged")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", attn_implementation="eager").eval()
    assert distance(again) < 1e-4


EVERY = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"}
MLP = {"gate_proj", "up_proj", "down_proj"}


@pytest.mark.parametrize(
    ("flags", "expected"),
    [({}, EVERY), ({"train_attn": False, "train_unembed": False}, MLP), ({"train_mlp": False}, EVERY - MLP)],
    ids=["all", "mlp", "no-mlp"],
)
def test_the_export_holds_exactly_the_trained_modules(
    tmp_path: Path, flags: dict[str, bool], expected: set[str]
) -> None:
    directory = _export(_trained("qwen3", **flags), tmp_path)
    config = json.loads((directory / "adapter_config.json").read_text())
    assert set(config["target_modules"]) == expected
    assert (config["peft_type"], config["task_type"], config["inference_mode"]) == ("LORA", "CAUSAL_LM", True)
    assert (config["r"], config["lora_alpha"], config["bias"]) == (8, 32.0, "none")
    assert config["base_model_name_or_path"] == base_path()
    tensors = load_file(directory / "adapter_model.safetensors")
    assert {key.split(".")[-3] for key in tensors} == expected
    prefix = "base_model.model.model.layers"
    shapes = {
        f"{prefix}.1.self_attn.q_proj.lora_A.weight": (8, 48),
        "base_model.model.lm_head.lora_B.weight": (VOCAB, 8),
        f"{prefix}.0.mlp.down_proj.lora_A.weight": (8, 80),
    }
    assert all(tensors[name].shape == shape for name, shape in shapes.items() if name in tensors)


def test_a_save_writes_only_safetensors_and_json_and_rounds_what_it_exports_alone(tmp_path: Path) -> None:
    adapter = {"adapter_config.json", "adapter_model.safetensors"}
    backend = make_backend()
    backend.create_model("m", spec(8, 5))
    new = saved(backend, "m", tmp_path / "new")
    assert {path.name for path in (tmp_path / "new").iterdir()} == adapter | {"state.json"}
    size = sum(file.stat().st_size for file in (tmp_path / "new").iterdir())
    assert size < 1.3 * sum(one.nbytes for one in new.values()), "the weights are there once"
    backend = _trained()
    saved(backend, "m", tmp_path / "state")
    assert {path.name for path in (tmp_path / "state").iterdir()} == adapter | {"state.json", "optimizer.safetensors"}
    assert {path.name for path in _export(backend, tmp_path / "own").iterdir()} == adapter
    (tmp_path / "rounded").mkdir()
    backend.save_adapter("m", tmp_path / "rounded", dtype="bfloat16")
    own, state, rounded = (
        load_file(tmp_path / name / "adapter_model.safetensors") for name in ("own", "state", "rounded")
    )
    assert {one.dtype for one in own.values()} == {torch.float32}
    assert_same(own, state)
    assert_same(rounded, {name: one.bfloat16() for name, one in own.items()})


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
    backend = _trained()
    saved(backend, "m", tmp_path / "state")
    backend.create_model("other", other)
    before = saved(backend, "other", tmp_path / "before")
    with pytest.raises(InvalidRequest) as refused:
        backend.load_state("other", tmp_path / "state", optimizer=True)
    for word in words:
        assert word in str(refused.value)
    assert_same(before, saved(backend, "other", tmp_path / "after"))


@pytest.mark.parametrize("optimizer", [True, False])
def test_state_in_the_first_format_is_still_read(tmp_path: Path, optimizer: bool) -> None:
    backend = _trained()
    save_file(saved(backend, "m", tmp_path / "now"), tmp_path / "state.safetensors")
    description = json.loads((tmp_path / "now" / "state.json").read_text()) | {"format": 1}
    del description["parts"]
    (tmp_path / "state.json").write_text(json.dumps(description))
    states = []
    for number, source in enumerate((tmp_path / "now", tmp_path)):
        backend.load_state("m", source, optimizer=optimizer)
        ok(backend.run([train("m", sft(3, 20))]))
        backend.optim_step("m", STEP)
        states.append(saved(backend, "m", tmp_path / str(number)))
    assert_same(*states)


def test_initial_weights_depend_on_the_seed_alone(tmp_path: Path) -> None:
    states = []
    for number, seeds in enumerate(((1, 2), (2, 1))):
        backend = make_backend()
        torch.manual_seed(number)
        for seed in seeds:
            backend.create_model(str(seed), spec(8, seed))
        states.append(saved(backend, "2", tmp_path / str(number)))
    assert_same(*states)
    drawn = next(value for key, value in states[0].items() if key.endswith("lora_A"))
    bound = 1 / np.sqrt(drawn.shape[1])
    assert 0.8 * bound < drawn.abs().max() <= bound
    assert not any(value.any() for key, value in states[0].items() if key.endswith("lora_B"))


def test_a_neighbour_in_a_merged_pass_changes_at_most_rounding(tmp_path: Path) -> None:
    """The bound of docs/decisions/lora-products.md for one pass, whatever the neighbours hold."""
    specs = {"one": spec(1, 1), "eight": spec(8, 2, train_mlp=False), "thirty-two": spec(32, 3, train_unembed=False)}
    own, states, logprobs = train("eight", sft(102, 3, 17, 1, 40)), [], []
    for number in range(4):
        backend = make_backend(micro_batch_tokens=48, merge=number > 0)
        for model_id, each in specs.items():
            backend.create_model(model_id, each)
        others = [train("one", rl(number, 12, 5), "ppo"), train("thirty-two", grpo(number, 2, 3, 20), "dro")]
        results = ok(backend.run([others[0], own, *others[1:]] if number else [own]))
        logprobs.append(results[1 if number else 0].logprobs)
        states.append(saved(backend, "eight", tmp_path / str(number)))
    for state, beside in zip(states[1:], logprobs[1:], strict=True):
        assert_close(state, states[0], 1e-5)
        for one, other in zip(beside, logprobs[0], strict=True):
            np.testing.assert_allclose(one, other, atol=1e-5)


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
    backend = make_backend()
    for name in ("wide", "narrow"):
        backend.create_model(name, spec())
    (result,) = ok(backend.run([train("wide", data)]))
    for datum, logprobs, own in zip(data, result.logprobs, columns, strict=True):
        assert logprobs.shape == datum.loss_inputs["target_tokens"].shape
        (apart,) = ok(backend.run([train("narrow", own)]))
        np.testing.assert_allclose(logprobs, np.stack(apart.logprobs, axis=1), atol=1e-5)
    assert_close(saved(backend, "wide", tmp_path / "w"), saved(backend, "narrow", tmp_path / "n"), 1e-5)


def test_each_loss_gives_its_metrics_named_with_a_reduction() -> None:
    """Own logprobs have the ratio 1. A step moves probability towards advantage."""
    backend = make_backend()
    expected = {"loss:sum", "num_tokens:sum", "computed_tokens:sum"}
    ratio = expected | {"ratio:mean", "ratio:max", "kl:mean", "active_tokens:sum", "ratio:sum", "kl:sum"}
    (datum,) = sft(0, 30)
    forward = TrainingPass("own", [datum], "cross_entropy", backward=False)
    backend.create_model("own", spec())
    (before,) = ok(backend.run([forward]))
    assert set(before.metrics) - {"weights:sum"} == expected
    given = {"target_tokens": datum.loss_inputs["target_tokens"], "logprobs": before.logprobs[0]}
    given["advantages"] = np.where(np.arange(30) % 2, 1, -1).astype(np.float32)
    for loss_fn in ("importance_sampling", "dro", "ppo", "cispo", "dppo", "dppo_kl", "gspo"):
        mask = {"sequence_ratio_mask": np.ones(30, np.float32)} if loss_fn == "gspo" else {}
        backend.create_model(loss_fn, spec())
        (result,) = ok(backend.run([train(loss_fn, [Datum(datum.tokens, given | mask)], loss_fn)]))
        clips = (
            {"clip_fraction:mean", "clipped:sum"} if loss_fn in ("ppo", "cispo", "dppo", "dppo_kl", "gspo") else set()
        )
        assert set(result.metrics) == ratio | clips, loss_fn
        assert result.metrics["num_tokens:sum"] == 30
        assert result.metrics["ratio:mean"] == pytest.approx(1, abs=1e-3)
        assert result.metrics["kl:mean"] == pytest.approx(0, abs=1e-4)
        assert all(type(value) is float and math.isfinite(value) for value in result.metrics.values())
        backend.optim_step(loss_fn, AdamParams(learning_rate=3e-3))
        (after,) = ok(backend.run([TrainingPass(loss_fn, [datum], "cross_entropy", backward=False)]))
        assert ((after.logprobs[0] - before.logprobs[0]) * given["advantages"]).sum() > 0.5, loss_fn


def test_stable_reinforce_served_as_cispo_gives_the_results_of_cispo_and_a_metric(tmp_path: Path) -> None:
    backend = make_backend(losses={"stable_reinforce": "cispo"})
    for name in ("stable", "cispo"):
        backend.create_model(name, spec(seed=1))
    passes = [train("stable", rl(0, 9), "stable_reinforce"), train("cispo", rl(0, 9), "cispo")]
    stable_reinforce, cispo = ok(backend.run(passes))
    assert stable_reinforce.metrics == cispo.metrics | {"stable_reinforce_is_cispo:max": 1.0}
    assert_same(saved(backend, "stable", tmp_path / "stable"), saved(backend, "cispo", tmp_path / "cispo"))
    with pytest.raises(InvalidRequest, match="kl_coeff"):
        backend.check(train("stable", rl(0, 9), "stable_reinforce", kl_coeff=0.1))
