"""Checks of a datum's pictures: where they stand among its tokens, and that no loss is computed at their places.

Reads arrays, and needs no tensors. Knows nothing of losses but the names of inputs, nor of how pictures are seen.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from skyrl.base.pictures.vision import VisionConfig
from skyrl.trainer.protocol import Datum, InvalidRequest


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


def text_targets(datum: Datum) -> npt.NDArray[np.bool_]:
    """Whether the target at each position is text: bool [N]."""
    text = np.ones(len(datum.tokens), np.bool_)
    for picture in datum.pictures:
        text[max(0, picture.start - 1) : picture.stop - 1] = False
    return text


def text_entries(data: Sequence[Datum]) -> npt.NDArray[np.bool_] | None:
    """The same for all entries of the sequences' target_tokens, [N] or [N, K], flat. None if there are no pictures."""
    if not any(datum.pictures for datum in data):
        return None
    widths = (datum.loss_inputs["target_tokens"].size // len(datum.tokens) for datum in data)
    return np.concatenate([np.repeat(text_targets(datum), width) for datum, width in zip(data, widths, strict=True)])


def check_picture_targets(datum: Datum, names: Iterable[str]) -> None:
    """Raise InvalidRequest for a weight, an advantage or a mask that is not 0 where the target is a picture's token.
    names: the inputs that must be 0 there."""
    if not datum.pictures:
        return
    pictured = ~text_targets(datum)
    for name in names:
        values = datum.loss_inputs.get(name)
        if values is None:
            continue
        asked = pictured & (values.reshape(len(values), -1) != 0).any(axis=1)
        if asked.any():
            position = int(asked.argmax())
            raise InvalidRequest(
                f"loss_fn_inputs.{name}: must be 0 at position {position}, whose target is a token of a picture: "
                "pictures are never trained on"
            )
