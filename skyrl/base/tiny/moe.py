"""Make a tiny mixture of experts from the checked-in model: `python -m skyrl.base.tiny.moe --out DIR`.

Each MLP of the tiny model becomes several experts: copies of the MLP, each with noise of its own, and a router with
random weights ("sparse upcycling", Komatsuzaki et al. 2023). So the mixture speaks as the tiny model does, roughly, and
its experts differ. Nothing is trained: it takes a second, and no weights are checked in.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from skyrl.base.tiny import model_path

EXPERTS, EXPERTS_PER_TOKEN = 8, 2
NOISE = 0.3
"""Standard deviation of an expert's noise, as a share of that of the MLP's weights."""
ROUTER_STD = 0.05
SEED = 21


def make(out: Path) -> None:
    """Write the model (3 layers, 8 experts, 2 per token, 2.9 M parameters, bfloat16) and its tokenizer into `out`."""
    dense: Any = AutoModelForCausalLM.from_pretrained(model_path(), dtype=torch.float32)
    shape = dense.config
    config = Qwen3MoeConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        moe_intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_hidden_layers,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads,
        max_position_embeddings=shape.max_position_embeddings,
        rope_parameters=shape.rope_parameters,
        rms_norm_eps=shape.rms_norm_eps,
        tie_word_embeddings=False,
        num_experts=EXPERTS,
        num_experts_per_tok=EXPERTS_PER_TOKEN,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        bos_token_id=None,
        eos_token_id=shape.eos_token_id,
        pad_token_id=shape.pad_token_id,
    )
    config.head_dim = shape.head_dim
    model = Qwen3MoeForCausalLM(config)
    generator = torch.Generator().manual_seed(SEED)
    weights = {name: tensor for name, tensor in dense.state_dict().items() if ".mlp." not in name}
    for number, layer in enumerate(dense.model.layers):
        prefix, mlp = f"model.layers.{number}.mlp.", layer.mlp
        gate, up, down = (
            _with_noise(part.weight.detach(), generator) for part in (mlp.gate_proj, mlp.up_proj, mlp.down_proj)
        )
        weights[f"{prefix}experts.gate_up_proj"] = torch.cat([gate, up], dim=1)
        weights[f"{prefix}experts.down_proj"] = down
        weights[f"{prefix}gate.weight"] = torch.randn(EXPERTS, shape.hidden_size, generator=generator) * ROUTER_STD
    model.load_state_dict(weights)
    model.generation_config = dense.generation_config
    model.bfloat16().save_pretrained(out)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(model_path() / name, out / name)


def _with_noise(weight: Tensor, generator: torch.Generator) -> Tensor:
    """[EXPERTS, *shape of weight]: the weight with different noise for each expert."""
    noise = torch.randn(EXPERTS, *weight.shape, generator=generator)
    return weight + noise * (NOISE * weight.std())


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a tiny mixture of experts.")
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    make(out)


if __name__ == "__main__":
    main()
