"""A sequence with two pictures of random numbers, for the comparison of packed rows with transformers at the start.

Knows what transformers' models that see are called with. Knows nothing of files or of image processors.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from skyrl.base.pictures.picture import PlacedPicture
from skyrl.training.backends.base import Datum
from skyrl.training.backends.torch_lora.vision import Seen, VisionTower

_GRIDS = ((2, 3), (2, 1))
"""Rows and columns of tokens of the pictures."""
_TEXTS = (3, 2, 4)
"""Tokens of text before the first picture, between both, and behind the last."""


@dataclass(frozen=True)
class VisionProbe:
    """`datum` and what was `seen` in it, for packed rows; `inputs`, the arguments of transformers' model."""

    datum: Datum
    seen: dict[str, Seen]
    inputs: dict[str, Tensor]

    @staticmethod
    def of(tower: VisionTower, vocab_size: int, device: torch.device) -> VisionProbe:
        """The same numbers in every call."""
        rng = np.random.default_rng(1)
        config, sight = tower.module.config, tower.sight
        numbers = config.in_channels * config.temporal_patch_size * config.patch_size**2
        tokens: list[int] = []
        placed: list[PlacedPicture] = []
        seen: dict[str, Seen] = {}
        patches: list[Tensor] = []
        grids: list[list[int]] = []
        for index, (rows, columns) in enumerate(_GRIDS):
            tokens += _text(rng, _TEXTS[index], vocab_size, sight.image_token_id)
            placed.append(PlacedPicture(len(tokens), rows * columns, f"probe {index}", "png"))
            tokens += [sight.image_token_id] * placed[-1].tokens
            grids.append([1, rows * sight.merge, columns * sight.merge])
            patches.append(torch.from_numpy(rng.normal(size=(rows * columns * sight.merge**2, numbers))).float())
            seen[placed[-1].digest] = tower.seen(patches[-1], torch.tensor(grids[-1:]))
        tokens += _text(rng, _TEXTS[-1], vocab_size, sight.image_token_id)
        ids = torch.tensor([tokens], device=device)
        inputs = {
            "input_ids": ids,
            "mm_token_type_ids": (ids == sight.image_token_id).int(),
            "pixel_values": torch.cat(patches).to(device),
            "image_grid_thw": torch.tensor(grids, device=device),
        }
        return VisionProbe(Datum(np.array(tokens), {}, tuple(placed)), seen, inputs)


def _text(rng: np.random.Generator, count: int, vocab_size: int, image_token_id: int) -> list[int]:
    drawn = rng.integers(0, vocab_size - 1, count)
    return (drawn + (drawn >= image_token_id)).tolist()
