"""Helpers for the tests of the torch backend: random tiny base models on disk, backends on them, random passes."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.func import functional_call
from transformers import AutoConfig, AutoModelForCausalLM

from skyrl.base.config.loading import load_config
from skyrl.base.types.weights import LoraSpec
from skyrl.trainer.protocol import Backend, Datum, PassResult, TrainingPass
from skyrl.trainer.ranks.full_backend import FullBackend
from skyrl.trainer.ranks.full_rank import FullRank
from skyrl.trainer.ranks.lora_backend import LoraBackend
from skyrl.trainer.ranks.lora_rank import LoraRank
from skyrl.trainer.ranks.rank import RankSettings
from tests.local_ranks import LocalRanks

VOCAB, CONTEXT = 97, 160
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.15,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen3": {"model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": False},
    "qwen3-tied": {"model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen2-window": {
        "model_type": "qwen2",
        "tie_word_embeddings": False,
        "use_sliding_window": True,
        "sliding_window": 5,
        "layer_types": ["full_attention", "sliding_attention"],
    },
    "llama": {"model_type": "llama", "tie_word_embeddings": False, "head_dim": 12},
}
EMPTY_SHARDS: dict[str, Any] = {"model_type": "qwen3", "head_dim": 4, "tie_word_embeddings": True}
"""The norms of queries and keys have 4 rows: of three ranks the last one has none."""
MIXTURE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "head_dim": 16,
    "tie_word_embeddings": False,
    "moe_intermediate_size": 24,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}
OTHER_SHAPES: dict[str, dict[str, Any]] = {
    "empty-shards": EMPTY_SHARDS,
    "mixture": MIXTURE,
    "mixture-of-wide-experts": {**MIXTURE, "moe_intermediate_size": 32},
    "mixture-with-dense-layer": {**MIXTURE, "mlp_only_layers": [0], "norm_topk_prob": False},
}
"""A wide expert's activations fill the registers of a CPU: then their bits do not depend on the rows beside them."""
_directory = tempfile.TemporaryDirectory(prefix="skyrl-torch-lora-")


@functools.cache
def base_path(architecture: str = "qwen3") -> str:
    """A directory with a random float32 model. Its norm weights and biases are random too."""
    settings = {**SHAPE, **{**ARCHITECTURES, **OTHER_SHAPES}[architecture]}
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    path = Path(_directory.name) / architecture
    model.save_pretrained(path)
    return str(path)


def make_backend(
    architecture: str = "qwen3",
    *,
    path: str | None = None,
    micro_batch_tokens: int = 4096,
    merge: bool = False,
    losses: dict[str, str] | None = None,
    **trainer: Any,
) -> LoraBackend:
    settings = {
        "trainer.micro_batch_tokens": micro_batch_tokens,
        "trainer.merge_passes": merge,
        **{f"trainer.{key}": value for key, value in trainer.items()},
    }
    config = load_config({"base_model": path or base_path(architecture), "backend_config": settings, "losses": losses})
    return LoraBackend(config)


def make_ranks(
    ranks: int,
    architecture: str = "qwen3",
    *,
    path: str | None = None,
    micro_batch_tokens: int | None = 48,
    merge: bool = False,
    timeout_s: float = 60.0,
    rank_class: type[LoraRank] = LoraRank,
    **trainer: Any,
) -> LoraBackend:
    """A backend with ranks on this machine. `close` it: the next backend uses its processes."""
    settings = {
        "trainer.micro_batch_tokens": micro_batch_tokens,
        "trainer.merge_passes": merge,
        "trainer.rank_timeout_s": timeout_s,
        **{f"trainer.{key}": value for key, value in trainer.items()},
    }
    config = load_config({"base_model": path or base_path(architecture), "backend_config": settings})
    return LoraBackend(config, LocalRanks(ranks, RankSettings.of(config), rank_class))


def make_full(
    architecture: str = "qwen3", ranks: int | None = None, *, path: str | None = None, **options: Any
) -> FullBackend:
    """A backend for full fine-tuning, on one device or with ranks on this machine. `options`: of the trainer, and
    the `rank_class`."""
    rank_class = options.pop("rank_class", FullRank)
    settings = {"full_finetuning": True, "micro_batch_tokens": 48, "rank_timeout_s": 60.0, **options}
    trainer = {f"trainer.{key}": value for key, value in settings.items()}
    config = load_config({"base_model": path or base_path(architecture), "backend_config": trainer})
    if ranks is None:
        return FullBackend(config)
    return FullBackend(config, LocalRanks(ranks, RankSettings.of(config), rank_class))


def files_saved(backend: Backend, model_id: str, directory: Path) -> dict[str, Tensor]:
    """Save a whole model's state and return its tensors: weights by their names, and `<part>.<name>`."""
    directory.mkdir(parents=True)
    backend.save_state(model_id, directory)
    return stored_tensors(directory)


def stored_tensors(directory: Path) -> dict[str, Tensor]:
    """Every tensor in the directory's safetensors files."""
    found: dict[str, Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        found |= load_file(file)
    return found


def spec(rank: int = 8, seed: int = 0, **flags: bool) -> LoraSpec:
    return replace(LoraSpec(rank=rank, alpha=32.0, seed=seed), **flags)


def sft(seed: int, *lengths: int) -> list[Datum]:
    """Next-token data. Some weights are 0, some fractional, some negative."""
    rng = np.random.default_rng(seed)
    data = []
    for length in lengths:
        text = rng.integers(0, VOCAB, length + 1)
        weights = rng.choice([0.0, 1.0, 0.5, -0.25], length, p=[0.2, 0.5, 0.2, 0.1]).astype(np.float32)
        data.append(Datum(text[:-1], {"target_tokens": text[1:], "weights": weights}))
    return data


def rl(seed: int, *lengths: int) -> list[Datum]:
    """Sampled data: a third of each sequence is prompt, with advantage 0 and logprob 0."""
    rng = np.random.default_rng(seed)
    data = []
    for length in lengths:
        text = rng.integers(0, VOCAB, length + 1)
        sampled = np.arange(length) >= length // 3
        logprobs = np.where(sampled, -5 + rng.normal(size=length), 0).astype(np.float32)
        advantages = np.where(sampled, rng.normal(), 0).astype(np.float32)
        inputs = {"target_tokens": text[1:], "logprobs": logprobs, "advantages": advantages}
        data.append(Datum(text[:-1], inputs))
    return data


def with_returns(data: Sequence[Datum], seed: int = 0) -> list[Datum]:
    """With inputs of a critic: positions with an advantage are in its mask, but for a few."""
    rng = np.random.default_rng(seed)
    made = []
    for datum in data:
        size = len(datum.tokens)
        mask = ((datum.loss_inputs["advantages"] != 0) & (rng.random(size) < 0.9)).astype(np.float32)
        values, returns = (rng.normal(size=size).astype(np.float32) * 0.3 for _ in range(2))
        made.append(Datum(datum.tokens, datum.loss_inputs | {"values": values, "returns": returns, "mask": mask}))
    return made


def with_rewards(data: Sequence[Datum], seed: int = 0) -> list[Datum]:
    made = []
    for datum in with_returns(data, seed):
        inputs = dict(datum.loss_inputs)
        inputs["rewards"] = inputs["mask"] * inputs.pop("returns")
        del inputs["advantages"]
        made.append(Datum(datum.tokens, inputs))
    return made


def cut(datum: Datum, length: int) -> Datum:
    """The first tokens of a sequence."""
    return Datum(datum.tokens[:length].copy(), {name: array[:length] for name, array in datum.loss_inputs.items()})


def grpo(seed: int, groups: int, samples: int, prompt: int, answer: int = 7) -> list[Datum]:
    """Samples of several prompts, in mixed order. Answers have 1 to `answer` tokens; a prompt has advantage 0."""
    rng = np.random.default_rng(seed)
    prompts = rng.integers(0, VOCAB, (groups, prompt))
    data = []
    for group in rng.permutation(np.repeat(np.arange(groups), samples)):
        text = np.concatenate([prompts[group], rng.integers(0, VOCAB, rng.integers(1, answer + 1))])
        sampled = np.arange(len(text) - 1) >= prompt - 1
        logprobs = np.where(sampled, -5 + rng.normal(size=len(text) - 1), 0).astype(np.float32)
        advantages = np.where(sampled, rng.normal(), 0).astype(np.float32)
        inputs = {"target_tokens": text[1:], "logprobs": logprobs, "advantages": advantages}
        data.append(Datum(text[:-1], inputs))
    return data


def overflowing() -> list[Datum]:
    """Sampled data with one ratio of e^70 and more: in float32 the loss is finite, the gradient's square is not."""
    data = rl(1, 20, 20)
    for datum in data:
        datum.loss_inputs["logprobs"] = np.full(20, -80, np.float32)
        datum.loss_inputs["advantages"] = np.eye(1, 20, dtype=np.float32)[0]
    return data


def train(model_id: str, data: list[Datum], loss_fn: str = "cross_entropy", **config: float) -> TrainingPass:
    return TrainingPass(model_id, data, loss_fn, config)


def ok(outcomes: list[PassResult | Exception]) -> list[PassResult]:
    results: list[PassResult] = []
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome
        results.append(outcome)
    return results


def stock_logprobs(model: Any, datum: Datum, parameters: dict[str, Tensor] | None = None) -> Tensor:
    """Of a sequence's targets by transformers' model, alone in a row. `parameters`: in the place of the model's."""
    given = {"input_ids": torch.from_numpy(datum.tokens)[None], "use_cache": False}
    made = model(**given) if parameters is None else functional_call(model, parameters, kwargs=given)
    targets = torch.from_numpy(datum.loss_inputs["target_tokens"])
    return made.logits[0].log_softmax(-1).gather(1, targets[:, None])[:, 0]


def stock_terms(logprobs: Tensor, datum: Datum) -> Tensor:
    """Of the loss, whose value is their sum: cross_entropy for a datum with weights, else importance_sampling."""
    inputs = {name: torch.from_numpy(value) for name, value in datum.loss_inputs.items()}
    if "weights" in inputs:
        return -inputs["weights"] * logprobs
    return -(logprobs - inputs["logprobs"]).exp() * inputs["advantages"]


def saved(backend: Backend, model_id: str, directory: Path) -> dict[str, Tensor]:
    """Save a model's state and return its tensors, named `<part>.<module>.lora_A`: weights, moments and pending
    gradient."""
    directory.mkdir(parents=True, exist_ok=True)
    backend.save_state(model_id, directory)
    peft = load_file(directory / "adapter_model.safetensors")
    named = {name.removeprefix("base_model.model.").removesuffix(".weight"): tensor for name, tensor in peft.items()}
    optimizer = directory / "optimizer.safetensors"
    return {f"weights.{name}": tensor for name, tensor in named.items()} | (
        load_file(optimizer) if optimizer.exists() else {}
    )


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


def assert_close(one: dict[str, Tensor], other: dict[str, Tensor], tolerance: float) -> None:
    """Equal up to `tolerance` of each tensor's largest value."""
    assert one.keys() == other.keys()
    for name in one:
        scale = other[name].abs().max().clamp(min=1e-3)
        difference = float((one[name] - other[name]).abs().max() / scale)
        assert difference <= tolerance, f"{name}: {difference:.1e}"


def with_experts(data: list[Datum], seed: int) -> list[Datum]:
    """Random experts for every second datum; nothing recorded for a third of their tokens."""
    rng = np.random.default_rng(seed)
    made = []
    for number, datum in enumerate(data):
        inputs = dict(datum.loss_inputs)
        if number % 2 == 0:
            experts = rng.permuted(np.tile(np.arange(8), (len(datum.tokens), 2, 1)), axis=-1)[..., :2]
            experts[rng.random(len(datum.tokens)) < 1 / 3] = -1
            inputs["routed_experts"] = experts
        made.append(Datum(datum.tokens, inputs))
    return made
