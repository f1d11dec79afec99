"""What of a model is trained: one type for the API, the database, the engine and the training backends."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LoraSpec:
    """The shape of a LoRA adapter. A client chooses it when it creates a model, and each checkpoint records it.

    `alpha / rank` scales the adapter's update. `seed` fixes the first values of lora_A; lora_B starts at 0. The three
    flags say which parts of the base model the adapter changes. Rank 0 is full fine-tuning: all parameters are trained.
    """

    rank: int
    alpha: float
    seed: int
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True

    @property
    def is_full(self) -> bool:
        """Whether the whole model is trained, and no adapter."""
        return self.rank == 0
