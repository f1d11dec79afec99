"""The expected numbers of sampling: transformers and PEFT in float32, on the tiny model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from skyrl.base.tiny import model_path


class Reference:
    """The base model, with the adapter in the PEFT directory `adapter` if one is given."""

    def __init__(self, adapter: Path | None = None) -> None:
        model = AutoModelForCausalLM.from_pretrained(model_path(), dtype=torch.float32)
        self._model = (model if adapter is None else PeftModel.from_pretrained(model, adapter)).eval()

    @torch.no_grad()
    def logits(self, tokens: list[int]) -> torch.Tensor:
        """float32 [len(tokens), vocabulary]: row i holds the logits for the token after token i."""
        return self._model(torch.tensor([tokens])).logits[0]

    def logprobs(self, tokens: list[int], temperature: float = 1.0) -> np.ndarray:
        """[len(tokens) - 1, vocabulary]: row i holds the distribution of token i + 1."""
        return (self.logits(tokens)[:-1] / temperature).log_softmax(-1).numpy()

    def of_tokens(self, tokens: list[int], temperature: float = 1.0) -> np.ndarray:
        """[len(tokens) - 1]: the logprob of every token but the first."""
        return np.take_along_axis(self.logprobs(tokens, temperature), np.asarray(tokens[1:])[:, None], 1)[:, 0]
