"""The words of the page's rows: each family's name, and what its tiny model tries that others do not."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """`title` may link to a section of the page."""

    title: str
    tries: str

    @property
    def plain(self) -> str:
        """The title without the link."""
        return re.sub(r" \[.*", "", self.title)


ROWS = {
    "qwen2": Row("Qwen2", "biases, tied embeddings"),
    "qwen2.5": Row("Qwen2.5", "yarn"),
    "qwen3": Row("Qwen3", "norms of queries and keys"),
    "llama-3": Row("Llama 3", "`llama3` rope scaling"),
    "mistral": Row("Mistral", "a window on all layers"),
    "gemma": Row("Gemma", "scaled embeddings, heads wider than the hidden size"),
    "gemma-2": Row("Gemma 2", "soft-capping of attention and logits, windows on some layers, `query_pre_attn_scalar`"),
    "gemma-3": Row("Gemma 3 (text)", "two kinds of rope, windows on some layers, norms of queries and keys"),
    "phi": Row("Phi-1.5, Phi-2", "partial rotary, biases also on `lm_head`, `dense`, `fc1`, `fc2`"),
    "phi-3": Row("Phi-3", "fused projections, a window"),
    "phi-4-mini": Row("Phi-4-mini", "fused projections, partial rotary"),
    "olmo": Row("OLMo", "norms without weights, clipped projections"),
    "olmo-2": Row("OLMo 2", "norms after the layers and of whole projections"),
    "olmo-3": Row("OLMo 3", "windows on some layers"),
    "granite": Row("Granite", "scaled embeddings, residuals, attention and logits"),
    "command-r": Row("Command R", "scaled logits, parallel layers, interleaved rope"),
    "command-a": Row("Command A [¹](#windows-of-command-a)", "the same, windows and layers without rope"),
    "smollm3": Row("SmolLM3", "layers without rope"),
    "qwen3.5": Row("Qwen3.5 (text)", "the gated delta rule beside attention with an output gate"),
    "qwen3.5 that sees": Row("Qwen3.5 (that sees)", "its text part; it also takes [pictures](pictures.md)"),
    "qwen3-vl": Row("Qwen3-VL", "its text part; it also takes [pictures](pictures.md)"),
    "qwen3-moe": Row("Qwen3-MoE", "experts, and the MLP of a layer without experts"),
    "qwen3-next": Row("Qwen3-Next", "the gated delta rule, a shared expert with its gate"),
    "qwen3.5-moe": Row("Qwen3.5-MoE (text)", "the same with other projections and fused experts"),
    "qwen3.5-moe that sees": Row("Qwen3.5-MoE (that sees)", "its text part; it also takes [pictures](pictures.md)"),
    "qwen3-vl-moe": Row("Qwen3-VL-MoE", "its text part; it also takes [pictures](pictures.md)"),
    "mixtral": Row("Mixtral", "experts called `w1`, `w2`, `w3`"),
    "gpt-oss": Row("gpt-oss", "sinks, windows on some layers, biases of experts, clamped activations"),
    "deepseek-v3": Row(
        "DeepSeek-V3", "latent attention, sigmoid routers in groups, shared experts, a dense first layer"
    ),
    "kimi-k2.5": Row("Kimi-K2.5", "DeepSeek-V3 as its text part; pictures are refused"),
    "glm-4.5": Row("GLM-4.5", "sigmoid routers in groups, shared experts, a first dense layer"),
    "nemotron-h": Row("Nemotron-3", "Mamba-2, experts without a gate, sigmoid routers in groups, shared experts"),
    "nemotron-h that sees": Row("Nemotron-3.5 (that sees)", "its text part; pictures are refused"),
    "kimi-linear": Row("Kimi-Linear", "the delta rule with a decay for each channel, latent attention without rope"),
    "minimax-m2": Row("MiniMax-M2", "sigmoid routers, partial rotary, norms of whole queries and keys"),
}
"""By the family's name in `tests.families`."""
