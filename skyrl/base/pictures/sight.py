"""Which base models see, and how many tokens a picture takes in their prompts.

Reads config.json and the settings of the image processor. Imports no library for images and no transformers, so that
the API can ask.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

SEES = frozenset({"qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"})
"""Model types whose pictures this server takes, for samples and for training."""


@dataclass(frozen=True)
class Sight:
    """How a base model sees. A picture is resized so that both sides are multiples of `patch * merge` and its area is
    in [min_pixels, max_pixels]; `(patch * merge)**2` pixels are one token. `image_token_id` stands for each of its
    tokens in a prompt."""

    model_type: str
    image_token_id: int
    patch: int
    merge: int
    min_pixels: int
    max_pixels: int

    @classmethod
    def of(cls, base_model: str) -> Self:
        """Of a directory, or of a model of the hub that is on this machine. Raises Blind."""
        raise NotImplementedError

    def tokens(self, width: int, height: int) -> int:
        """How many tokens a picture of this size in pixels takes. Raises BadPicture if the processor refuses it."""
        raise NotImplementedError


class Blind(Exception):
    """The base model takes no pictures. The message says why, as the end of a sentence about the model."""
