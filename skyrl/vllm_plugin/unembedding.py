"""Lets vLLM serve adapters on lm_head in every architecture that it computes logits of in the usual way.

vLLM wraps `logits_processor` for such adapters where a model's class names lm_head. Llama and Qwen3 do. Qwen2, Mistral
and Gemma do not; Gemma 2 and Command have no lm_head, and use the embeddings; and vLLM refuses vocabularies above a
bound. In all of them vLLM would refuse an adapter with an lm_head part: the SDK's default. The wrapper is the same for
all. It adds an adapter's part to the logits before they are scaled or soft-capped.

Knows vLLM's models and its layers for adapters. Knows nothing of adapters' files or of the arithmetic.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.lora.layers.logits_processor import LogitsProcessorWithLoRA
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.v1.worker.lora_model_runner_mixin import LoRAModelRunnerMixin

VLLMS_BOUND = 258048
"""The largest vocabulary that vLLM wraps by itself."""


def serve_lm_head() -> None:
    """Patch this process. A second call changes nothing."""
    original = LoRAModelRunnerMixin.load_lora_model
    if original.__module__ == __name__:
        return

    def load_lora_model(runner: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        add_lm_head(model)
        return original(runner, model, *args, **kwargs)

    LoRAModelRunnerMixin.load_lora_model = load_lora_model  # type: ignore[method-assign]
    _allow_any_vocabulary()


def add_lm_head(model: Any) -> None:
    """Name lm_head among the layers of `model` that adapters may change, where vLLM's wrapper can serve it.

    A model that computes logits with its embeddings gets an lm_head with the same weights, which only tells vLLM where
    the adapter's part belongs."""
    if not isinstance(getattr(model, "logits_processor", None), LogitsProcessor):
        return
    embeddings = getattr(getattr(model, "model", None), "embed_tokens", None)
    if not hasattr(model, "lm_head") and isinstance(embeddings, VocabParallelEmbedding):
        model.lm_head = _tied_to(embeddings)
    if isinstance(getattr(model, "lm_head", None), VocabParallelEmbedding):
        model.embedding_modules = {**getattr(model, "embedding_modules", {}), "lm_head": "output_embeddings"}


def _tied_to(embeddings: Any) -> Any:
    with torch.device("meta"):  # so that no second matrix is allocated
        head = ParallelLMHead(
            embeddings.num_embeddings,
            embeddings.embedding_dim,
            params_dtype=embeddings.weight.dtype,
            org_num_embeddings=embeddings.org_vocab_size,
        )
    return head.tie_weights(embeddings)


def _allow_any_vocabulary() -> None:
    """vLLM's bound is older than its kernels: these go through the vocabulary in blocks, whatever its size."""
    original = LogitsProcessorWithLoRA.create_lora_weights

    def create_lora_weights(layer: Any, *args: Any, **kwargs: Any) -> None:
        processor = layer.base_layer
        vocabulary = processor.vocab_size
        processor.vocab_size = min(vocabulary, VLLMS_BOUND)
        try:
            original(layer, *args, **kwargs)
        finally:
            processor.vocab_size = vocabulary
        if vocabulary > VLLMS_BOUND:
            slots, one, _, rank = layer.lora_b_stacked.shape
            layer.lora_b_stacked = layer.lora_b_stacked.new_zeros(slots, one, vocabulary, rank)

    LogitsProcessorWithLoRA.create_lora_weights = create_lora_weights  # type: ignore[method-assign]
