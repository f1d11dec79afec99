"""Refuses token ids for which the model has no row, though its tokenizer has them.

vLLM 0.32 takes every id that the tokenizer or the model has, because models that see have placeholders beyond their
rows. A model without pictures looks such an id up in its embedding: on a CPU an error that ends the engine core. Gemma
3's tokenizer has one id more than its small models have rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.renderers.base import BaseRenderer


def refuse_ids_beyond_rows() -> None:
    """Patch this process, which is vLLM's API server. A second call changes nothing."""
    validate = BaseRenderer.validate_token_ids
    if validate.__module__ == __name__:
        return

    def validate_token_ids(renderer: Any, token_ids: Sequence[int], *, parameter: str | None = None) -> None:
        validate(renderer, token_ids, parameter=parameter)
        config = renderer.model_config
        if not token_ids or config.is_multimodal_model:
            return
        if (highest := max(token_ids)) >= (rows := config.get_vocab_size()):
            raise VLLMValidationError(
                f"Token id {highest} is out of vocabulary: the model has {rows} rows, and its tokenizer more tokens",
                parameter=parameter,
            )

    BaseRenderer.validate_token_ids = validate_token_ids  # type: ignore[method-assign]
