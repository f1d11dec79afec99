"""Pictures have no part in a loss: which targets are tokens of pictures, and what a pass must not ask for there.

A target is the next token. So the targets at positions [start - 1, stop - 1) of a sequence are those of a picture that
takes the positions [start, stop). The target at the picture's last position is the text behind it, and may be trained.
Knows arrays. Knows no model.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from skyrl.training.backends.base import Datum, InvalidRequest
from skyrl.training.backends.torch_lora.losses import Loss

_SAMPLED = "logprobs"
"""The one input of losses that may be anything where nothing is trained."""


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


def check_picture_targets(datum: Datum, loss: Loss) -> None:
    """Raise InvalidRequest for a weight, an advantage or a mask that is not 0 where the target is a picture's token."""
    if not datum.pictures:
        return
    pictured = ~text_targets(datum)
    for name in (*loss.required, *loss.optional):
        values = datum.loss_inputs.get(name)
        if values is None or name == _SAMPLED:
            continue
        asked = pictured & (values.reshape(len(values), -1) != 0).any(axis=1)
        if asked.any():
            position = int(asked.argmax())
            raise InvalidRequest(
                f"loss_fn_inputs.{name}: must be 0 at position {position}, whose target is a token of a picture: "
                "pictures are never trained on"
            )
