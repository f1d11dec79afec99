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
KERNELS_BOUND = 2**31
"""The most elements of all slots' matrices together that vLLM's kernels for CUDA can address."""


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
            padding_size=embeddings.padding_size,
        )
    return head.tie_weights(embeddings)


def _allow_any_vocabulary() -> None:
    """vLLM's bound is older than its kernels: these go through the vocabulary in blocks.

    The kernels for CUDA find a slot's matrix by a 32-bit product. More elements than that are refused: ValueError."""
    original = LogitsProcessorWithLoRA.create_lora_weights

    def create_lora_weights(layer: Any, max_loras: int, lora_config: Any, *args: Any, **kwargs: Any) -> None:
        processor = layer.base_layer
        vocabulary, rank = processor.vocab_size, lora_config.max_lora_rank
        if torch.device(layer.device).type == "cuda" and max_loras * vocabulary * rank > KERNELS_BOUND:
            raise ValueError(
                f"max_loras ({max_loras}) x vocabulary ({vocabulary}) x max_lora_rank ({rank}) is above "
                f"{KERNELS_BOUND}, which vLLM's kernels for adapters on lm_head can address; lower "
                "trainer.policy.model.lora.max_loras or trainer.policy.model.lora.max_lora_rank"
            )
        processor.vocab_size = vocabulary if vocabulary <= VLLMS_BOUND else 0  # so that it allocates nothing
        try:
            original(layer, max_loras, lora_config, *args, **kwargs)
        finally:
            processor.vocab_size = vocabulary
        if vocabulary > VLLMS_BOUND:
            slots, one, _, rank = layer.lora_b_stacked.shape
            dtype = layer.lora_b_stacked.dtype
            # Not new_zeros, which `memory_cpu` does not know
            layer.lora_b_stacked = torch.zeros(slots, one, vocabulary, rank, dtype=dtype, device=layer.device)

    LogitsProcessorWithLoRA.create_lora_weights = create_lora_weights  # type: ignore[method-assign]
