"""How many tokens a server's vocabulary has, and how many a sequence may have."""

from __future__ import annotations

from dataclasses import dataclass

CONTEXT_KEY = "generator.inference_engine.max_model_len"


@dataclass(frozen=True, slots=True)
class ContextLimits:
    """Limits of the inference server. None if unknown, for an external server, which then refuses requests itself.
    `base_model` is the name of the base model, for messages; empty where the server has one. `model_context` is the
    context of the model itself, if that is known."""

    vocab_size: int | None = None
    max_context: int | None = None
    base_model: str = ""
    model_context: int | None = None

    @property
    def bound(self) -> str:
        """The end of a sentence that names the key, if this server's context is below the model's; else empty."""
        if self.max_context is None or self.model_context is None or self.max_context >= self.model_context:
            return ""
        return f"; the model itself takes {self.model_context}, and {CONTEXT_KEY} is the bound here"
