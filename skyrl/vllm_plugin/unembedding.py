"""Lets vLLM serve adapters on lm_head in every architecture that it computes logits of in the usual way.

vLLM wraps `logits_processor` for such adapters where a model's class names lm_head. Llama and Qwen3 do, Qwen2, Mistral
and Gemma do not, and refuse an adapter with an lm_head part: the SDK's default. The wrapper is the same for all.
"""

from __future__ import annotations

from typing import Any

from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.v1.worker.lora_model_runner_mixin import LoRAModelRunnerMixin

LARGEST_VOCABULARY = 258048
"""vLLM's bound for adapters on lm_head. It refuses to start beyond."""


def name_lm_head() -> None:
    """Patch this process. A second call changes nothing."""
    original = LoRAModelRunnerMixin.load_lora_model
    if original.__module__ == __name__:
        return

    def load_lora_model(runner: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        add_lm_head(model)
        return original(runner, model, *args, **kwargs)

    LoRAModelRunnerMixin.load_lora_model = load_lora_model  # type: ignore[method-assign]


def add_lm_head(model: Any) -> None:
    """Name lm_head among the layers of `model` that adapters may change, where vLLM's wrapper can serve it."""
    head, processor = getattr(model, "lm_head", None), getattr(model, "logits_processor", None)
    if not isinstance(head, VocabParallelEmbedding) or not isinstance(processor, LogitsProcessor):
        return
    if processor.vocab_size <= LARGEST_VOCABULARY:
        model.embedding_modules = {**getattr(model, "embedding_modules", {}), "lm_head": "output_embeddings"}
