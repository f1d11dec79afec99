"""Helpers for the GPU tests: the device, base models with random weights, backends, and distances."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import transformers
from packaging.version import Version
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from skyrl.base.config.loading import load_config
from skyrl.trainer.model import base_model as model_module
from skyrl.trainer.protocol import Datum, PassResult
from skyrl.trainer.ranks import sharded_model
from skyrl.trainer.ranks.lora_backend import LoraBackend

DEVICE = os.environ.get("SKYRL_TEST_DEVICE") or "cuda"
REHEARSAL = DEVICE == "cpu"
SETTINGS: dict[str, Any] = json.loads(os.environ.get("SKYRL_TEST_SETTINGS") or "{}")
"""More of `backend_config`: a switch whose figures are wanted, for example {"trainer.kernels": "triton"}."""
_COMMON: dict[str, Any] = {
    "model_type": "qwen3",
    "initializer_range": 0.06,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
NUMERICS: dict[str, Any] = _COMMON | {
    "vocab_size": 1000,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}
"""Large enough for bfloat16 to round, small enough for many comparisons."""
WINDOW: dict[str, Any] = {
    "model_type": "qwen2",
    "use_sliding_window": True,
    "sliding_window": 16,
    "layer_types": ["full_attention", "sliding_attention"] * 2,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen3": NUMERICS,
    "qwen2-window": NUMERICS | WINDOW,
    "llama": NUMERICS | {"model_type": "llama"},
    "qwen3.5": NUMERICS
    | {
        "model_type": "qwen3_5_text",
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    },
}
QWEN3_600M: dict[str, Any] = _COMMON | {
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "tie_word_embeddings": True,
    "initializer_range": 0.02,
}
"""Qwen3-0.6B's shape, with random weights."""
LARGE = QWEN3_600M if not REHEARSAL else NUMERICS | {"vocab_size": 4000, "max_position_embeddings": 40_960}


NEW_FAMILIES = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.19"), reason="families that need transformers 5.19"
)


def build(settings: dict[str, Any], directory: Path) -> str:
    """Make a base model with random weights, drawn on the device; returns its directory."""
    path = directory / f"{settings['model_type']}-{settings['hidden_size']}-{settings['vocab_size']}"
    if not path.exists():
        values = dict(settings)
        config = AutoConfig.for_model(values.pop("model_type"), **values)
        torch.manual_seed(7)
        with torch.device(DEVICE):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(path)
    return str(path)


def backend_on(
    path: str,
    *,
    dtype: torch.dtype = torch.bfloat16,
    merge: bool = False,
    budget: int | None = 4096,
    keep_quantized: bool = False,
    attention: str = "sdpa",
) -> LoraBackend:
    """A backend whose base model has this dtype. On CUDA the backend uses bfloat16 by default. `budget`: tokens of a
    micro-batch; None: as many as the memory holds."""
    settings = {
        **({} if budget is None else {"trainer.micro_batch_tokens": budget}),
        "trainer.merge_passes": merge,
        "trainer.keep_quantized": keep_quantized,
        "trainer.attention": attention,
        "trainer.policy.model.lora.max_lora_rank": 64,
        **SETTINGS,
    }
    config = load_config({"base_model": path, "backend_config": settings})
    if DEVICE == "cuda" and dtype is torch.bfloat16:
        return LoraBackend(config)
    with (
        patch.object(model_module, "base_dtype", lambda device: dtype),
        patch.object(sharded_model, "base_dtype", lambda device: dtype),
    ):
        return LoraBackend(config)


def stock(path: str, dtype: torch.dtype) -> Any:
    """The model of transformers, with its eager attention in plain torch."""
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager")
    return model.to(DEVICE).eval()


def texts(seed: int, vocab: int, *lengths: int) -> list[Datum]:
    """Next-token data in which every token has a weight of 1 or 0.5."""
    rng = np.random.default_rng(seed)
    data = []
    for length in lengths:
        text = rng.integers(0, vocab, length + 1)
        weights = rng.choice([1.0, 0.5], length).astype(np.float32)
        data.append(Datum(text[:-1], {"target_tokens": text[1:], "weights": weights}))
    return data


def logprobs_of(model: Any, datum: Datum) -> Tensor:
    """The logprobs of the targets, float32 [N], computed for one sequence at a time."""
    logits = model(input_ids=torch.from_numpy(datum.tokens).to(DEVICE)[None], use_cache=False).logits[0].float()
    targets = torch.from_numpy(datum.loss_inputs["target_tokens"]).to(DEVICE)
    return logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]


def ok(outcomes: Iterable[PassResult | Exception]) -> list[PassResult]:
    results: list[PassResult] = []
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome
        results.append(outcome)
    return results


def flat(result: PassResult) -> Tensor:
    return torch.from_numpy(np.concatenate([logprobs.reshape(-1) for logprobs in result.logprobs]))


def gradient_of(backend: LoraBackend, model_id: str, directory: Path) -> dict[str, Tensor]:
    """The pending gradient by module and matrix, float32 on the CPU."""
    directory.mkdir(parents=True, exist_ok=True)
    backend.save_state(model_id, directory)
    stored = load_file(directory / "optimizer.safetensors")
    return {name.removeprefix("gradient."): value for name, value in stored.items() if name.startswith("gradient.")}


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """||one - other|| / ||other|| over all matrices together."""
    assert one.keys() == other.keys()
    difference = sum(float((one[name] - other[name]).square().sum()) for name in one)
    return (difference / sum(float(value.square().sum()) for value in other.values())) ** 0.5


def wait() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()
