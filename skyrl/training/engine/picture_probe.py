"""A prompt with a picture, for the comparison of the sampler with the trainer: another vision tower, image processor or
order of positions would change the logprobs of the text behind the picture."""

from __future__ import annotations

from dataclasses import dataclass
from io import BytesIO

import numpy as np
import numpy.typing as npt
from PIL import Image

from skyrl.base.pictures.picture import PlacedPicture, digest_of
from skyrl.base.pictures.vision import VisionConfig
from skyrl.trainer.protocol import Datum

COLUMNS, ROWS = 3, 2
"""Tokens of the picture, before the image processor resizes it."""


@dataclass(frozen=True)
class PicturePrompt:
    """`before` and `behind`: int64, the text around the picture. `picture`: its place. `file`: a PNG."""

    before: npt.NDArray[np.int64]
    behind: npt.NDArray[np.int64]
    picture: PlacedPicture
    file: bytes
    image_token_id: int

    @classmethod
    def of(cls, sight: VisionConfig, text: npt.NDArray[np.int64], max_context: int) -> PicturePrompt | None:
        """The same picture at each start, of random numbers, between the halves of the text. None if it has more tokens
        than the context has room for."""
        width, height = COLUMNS * sight.patch * sight.merge, ROWS * sight.patch * sight.merge
        tokens = sight.tokens(width, height)
        if len(text) + tokens >= max_context:
            return None
        pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
        file = BytesIO()
        Image.fromarray(pixels).save(file, "PNG")
        before, behind = np.array_split(text, 2)
        placed = PlacedPicture(len(before), tokens, digest_of(file.getvalue()), "png")
        return cls(before, behind, placed, file.getvalue(), sight.image_token_id)

    @property
    def datum(self) -> Datum:
        """Its targets are the tokens that follow."""
        image = np.full(self.picture.tokens, self.image_token_id)
        tokens = np.concatenate([self.before, image, self.behind])
        return Datum(tokens[:-1], {"target_tokens": tokens[1:]}, (self.picture,))

    @property
    def token_ids(self) -> list[int]:
        """As vLLM takes them: one token stands for the picture."""
        return [*self.before.tolist(), self.image_token_id, *self.behind.tolist()]
