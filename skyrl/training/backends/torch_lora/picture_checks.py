"""Checks of the pictures of a sequence before a pass runs. Opens no picture.

Reads arrays, digests and the model's limits. Knows nothing of vision towers.
"""

from __future__ import annotations

from collections.abc import Mapping

from skyrl.base.pictures.vision import VisionConfig
from skyrl.training.backends.base import Datum, InvalidRequest


def check_pictures(datum: Datum, files: Mapping[str, bytes], sight: VisionConfig | None) -> None:
    """Raise InvalidRequest for pictures of a model that takes text only, without a file, or in another place than among
    the tokens that stand for them."""
    done = 0
    for picture in datum.pictures:
        if sight is None:
            raise InvalidRequest("model_input: the base model takes text only")
        if picture.digest not in files:
            raise InvalidRequest(f"model_input: the file of the picture at position {picture.start} is missing")
        if not done <= picture.start < picture.stop <= len(datum.tokens):
            raise InvalidRequest(
                f"model_input: a picture at positions {picture.start} to {picture.stop - 1} does not fit between "
                f"position {done} and the end at {len(datum.tokens)}"
            )
        if (datum.tokens[picture.start : picture.stop] != sight.image_token_id).any():
            raise InvalidRequest(
                f"model_input: the picture at position {picture.start} needs token {sight.image_token_id} at all of "
                f"its {picture.tokens} positions"
            )
        done = picture.stop
