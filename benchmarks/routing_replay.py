"""The gap between a sampler in bfloat16 and the trainer in float32 on a mixture of experts, with and without routing
replay: `python -m benchmarks.routing_replay`.

The sampler is transformers in bfloat16, which draws the tokens and tells the experts that it has used. The trainer is
skyrl's backend on the same weights, with an untrained adapter. So the gap is the rounding of the sampler, and what it
does to the choice of experts. Two mixtures: the tiny one, and a random one with more layers and experts.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from skyrl.base.config.loading import load_config
from skyrl.base.tiny import moe
from skyrl.base.types.lora import LoraSpec
from skyrl.training.backends.base import Datum, PassResult, TrainingPass
from skyrl.training.backends.torch_lora.backend import TorchLoraBackend
from skyrl.training.backends.torch_lora.routing import own_experts

SEQUENCES, TOKENS = 16, 192


def make_large(directory: Path) -> None:
    """A random mixture: 8 layers of 64 experts, 8 per token."""
    torch.manual_seed(3)
    config = Qwen3MoeConfig(
        vocab_size=512,
        hidden_size=256,
        moe_intermediate_size=64,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=2,
        num_experts=64,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    Qwen3MoeForCausalLM(config).bfloat16().save_pretrained(directory)


@torch.no_grad()
def sample(model: Any, seed: int) -> tuple[Tensor, Tensor]:
    """Sequences drawn from the model at temperature 1, int64 [SEQUENCES, TOKENS], and the logprobs of all tokens but
    the first, float32."""
    torch.manual_seed(seed)
    tokens = torch.randint(0, model.config.vocab_size, (SEQUENCES, 8))
    tokens = model.generate(
        tokens, do_sample=True, top_k=0, max_new_tokens=TOKENS - 8, min_new_tokens=TOKENS - 8, use_cache=True
    )
    logprobs = [model(input_ids=row[None]).logits[0, :-1].float().log_softmax(-1) for row in tokens]
    return tokens, torch.stack(logprobs).gather(2, tokens[:, 1:, None])[..., 0]


@dataclass(frozen=True)
class Gap:
    """Of trainer's minus sampler's logprobs, in nats. `kl`: the mean of r - 1 - log r over the sampled tokens, with r
    the trainer's probability over the sampler's."""

    mean: float
    p99: float
    largest: float
    kl: float

    @staticmethod
    def of(trained: PassResult, sampled: np.ndarray) -> Gap:
        log_ratio = np.concatenate(trained.logprobs) - sampled
        size = np.abs(log_ratio)
        kl = np.exp(log_ratio) - 1 - log_ratio
        return Gap(float(size.mean()), float(np.quantile(size, 0.99)), float(size.max()), float(kl.mean()))


def measure(name: str, path: Path) -> None:
    """Print two lines for one mixture."""
    sampler = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
    tokens, sampled = sample(sampler, seed=5)
    backend = TorchLoraBackend(load_config({"base_model": str(path)}))
    backend.create_model("m", LoraSpec(8, 32.0, 0, train_mlp=False))
    used = [own_experts(sampler, row[:-1]).numpy() for row in tokens]
    exact = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    differ = np.concatenate(
        [
            (np.sort(one) != np.sort(own_experts(exact, row[:-1]).numpy())).any(-1)
            for one, row in zip(used, tokens, strict=True)
        ]
    )
    print(
        f"{name}: other experts than in float32 for {differ.mean():.1%} of (token, layer), in some layer for "
        f"{differ.any(1).mean():.1%} of tokens"
    )
    free = [Datum(row[:-1].numpy(), {"target_tokens": row[1:].numpy()}) for row in tokens]
    replayed = [
        Datum(datum.tokens, {**datum.loss_inputs, "routed_experts": experts})
        for datum, experts in zip(free, used, strict=True)
    ]
    passes = [TrainingPass("m", data, "cross_entropy", backward=False) for data in (free, replayed)]
    for label, result in zip(("free", "replayed"), backend.run(passes), strict=True):
        if isinstance(result, Exception):
            raise result
        gap = Gap.of(result, sampled.flatten().numpy())
        print(f"  {label:9} mean {gap.mean:.5f}  p99 {gap.p99:.4f}  largest {gap.largest:.3f}  KL {gap.kl:.2e}")


def main() -> None:
    torch.set_num_threads(1)
    for name, make in (("tiny (3 layers, 2 of 8 experts)", moe.make), ("random (8 layers, 8 of 64)", make_large)):
        with tempfile.TemporaryDirectory() as directory:
            make(Path(directory))
            measure(name, Path(directory))


if __name__ == "__main__":
    main()
