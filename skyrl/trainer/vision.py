"""The frozen vision tower of a base model: turns pictures into embeddings, once each, and keeps them for a while.

Pictures go through the tower one at a time, so that the embeddings of a picture do not depend on others. `VisionProbe`
is a sequence with two pictures of random numbers, for the comparison of packed rows with transformers at the start.
Knows transformers' vision towers and image processors. Knows nothing of packed rows, adapters or losses.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from cachetools import LRUCache
from PIL import Image
from torch import Tensor
from transformers import AutoImageProcessor

from skyrl.base.pictures.decoding import opened
from skyrl.base.pictures.picture import BadPicture, PlacedPicture
from skyrl.base.pictures.vision import NoVision, VisionConfig
from skyrl.trainer.device import align
from skyrl.trainer.files.config import LOADING_ERRORS, cannot_load, one_line
from skyrl.trainer.protocol import Datum, InvalidRequest

KEPT_BYTES = 512 * 2**20
"""Main memory for embeddings that are kept. A picture of 1,024 tokens has 17 MB in bfloat16 for a hidden size of 2,048
with three deepstack layers (Qwen3-VL-30B-A3B), 8 MB for 4,096 without (Qwen3.5-397B-A17B)."""


@dataclass(frozen=True)
class Seen:
    """What the language model gets of one picture, in main memory. grid: the rows and columns of its tokens.
    embeddings: [tokens, hidden], in the base model's dtype, row by row. `deepstack`: what is added behind each of the
    first decoder layers, [tokens, hidden] each; empty if the family has none."""

    grid: tuple[int, int]
    embeddings: Tensor
    deepstack: tuple[Tensor, ...] = ()

    @property
    def tokens(self) -> int:
        return len(self.embeddings)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.embeddings, *self.deepstack))


class VisionTower:
    """The vision tower and projector on one device. Nothing trains them. One thread at a time may look."""

    def __init__(
        self, sight: VisionConfig, module: Any, processor: Any, device: torch.device, *, kept_bytes: int = KEPT_BYTES
    ) -> None:
        """`module`: transformers' tower, with its weights. `processor`: the image processor of the base model.
        `kept_bytes`: see `KEPT_BYTES`."""
        module.set_attn_implementation("sdpa")  # eager attention keeps all scores: 17 GB for 16,384 patches
        self.sight = sight
        self.module: Any = module.to(device).eval().requires_grad_(False)
        align(self.module.parameters())
        self._processor = processor
        self._device = device
        self._kept: LRUCache[str, Seen] = LRUCache(kept_bytes, getsizeof=lambda seen: seen.nbytes)

    def look_at(self, numbered: Iterable[tuple[int, Datum]], files: Mapping[str, bytes]) -> dict[str, Seen]:
        """All pictures of checked sequences, by digest. numbered: the sequences with their indices in the pass; files:
        of each digest. Raises InvalidRequest if a file cannot be opened, or a picture has another number of tokens than
        its sequence leaves for it."""
        found: dict[str, Seen] = {}
        for index, datum in numbered:
            for picture in datum.pictures:
                where = f"data[{index}]: model_input: the picture at position {picture.start}"
                try:
                    seen = found.get(picture.digest) or self._seen(picture, files[picture.digest])
                except BadPicture as bad:
                    raise InvalidRequest(f"{where} {bad}") from None
                if seen.tokens != picture.tokens:
                    raise InvalidRequest(
                        f"{where} takes {seen.tokens} tokens of the base model, and {picture.tokens} were given"
                    )
                found[picture.digest] = seen
        return found

    def _seen(self, picture: PlacedPicture, file: bytes) -> Seen:
        if (kept := self._kept.get(picture.digest)) is not None:
            return kept
        patches = self._processor(images=[opened(file, picture.format)], return_tensors="pt")
        seen = self.seen(patches["pixel_values"], patches["image_grid_thw"])
        if seen.nbytes <= self._kept.maxsize:
            self._kept[picture.digest] = seen
        return seen

    @torch.no_grad()
    def seen(self, patches: Tensor, grid: Tensor) -> Seen:
        """Of one picture. patches: float [patches, numbers of a patch], as the image processor gives them; grid: int64
        [1, 3], of which the last two are the rows and columns of patches."""
        found = self.module(patches.to(self._device, self.module.dtype), grid_thw=grid.to(self._device))
        deepstack = getattr(found, "deepstack_features", None) or ()
        _, rows, columns = grid[0].tolist()
        return Seen(
            (rows // self.sight.merge, columns // self.sight.merge),
            found.pooler_output.cpu(),
            tuple(features.cpu() for features in deepstack),
        )


def sight_of(path: str) -> VisionConfig | None:
    """How the base model sees; None if it sees nothing, or has no image processor."""
    try:
        return VisionConfig.of(path)
    except NoVision:
        return None


def make_tower(path: str, module: Any | None, device: torch.device, *, pictures: bool) -> VisionTower | None:
    """`module`: transformers' tower of the base model at this path, with its weights, or None. None without `pictures`,
    and for a model that sees nothing. Raises ConfigError if its image processor cannot be used."""
    sight = sight_of(path) if pictures else None
    if sight is None or module is None:
        return None
    settings: Any = module.config
    for name, of_processor, of_tower in (
        ("patch_size", sight.patch, settings.patch_size),
        ("merge_size", sight.merge, settings.spatial_merge_size),
    ):
        if of_processor != of_tower:
            raise cannot_load(path, f"its image processor's {name} is {of_processor}, its vision tower's {of_tower}")
    return VisionTower(sight, module, load_processor(path), device)


def load_processor(path: str) -> Any:
    """The image processor of the base model: the one that vLLM chooses, which is transformers' default. Raises
    ConfigError if it cannot be loaded, or fails on a small picture."""
    try:
        processor = AutoImageProcessor.from_pretrained(path)
        processor(images=[Image.new("RGB", (64, 64))], return_tensors="pt")
    except (*LOADING_ERRORS, RuntimeError, TypeError, AttributeError) as error:
        raise cannot_load(path, f"its image processor: {one_line(error)}") from error
    return processor


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
