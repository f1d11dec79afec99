"""The places of pictures among the tokens of a sequence. Sizes come from `VisionConfig`; knows no file and no model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from skyrl.base.pictures.picture import MAX_PICTURES, BadPicture, PictureFormat, PlacedPicture
from skyrl.base.pictures.vision import VisionConfig
from skyrl.base.wire.errors import RequestError
from skyrl.base.wire.sample_request import ImagePart, digest_in

Placed = tuple[npt.NDArray[np.int64], tuple[PlacedPicture, ...]]


class KnownPicture(msgspec.Struct, frozen=True):
    """What is known of a stored file: its format and its size in pixels; or `error`, why it is no picture that this
    server takes."""

    format: PictureFormat
    width: int = 0
    height: int = 0
    error: str | None = None


def place(
    text: npt.NDArray[np.int64], images: Sequence[ImagePart], known: Mapping[str, KnownPicture], sight: VisionConfig
) -> Placed:
    """The tokens of a sequence, int64 [N], with each picture's `image_token_id`s between the tokens of its text; and
    the pictures. `known`: by digest.

    Raises RequestError that names the chunk, for a picture that is not stored or not taken, and where the client
    expects another number of tokens.
    """
    if len(images) > MAX_PICTURES:
        raise RequestError(
            f"holds {len(images)} images, and one sequence may have {MAX_PICTURES}", field=images[MAX_PICTURES].name
        )
    if (text == sight.image_token_id).any():
        raise RequestError(
            f"token id {sight.image_token_id} stands for images; beside an image it may not be in the text",
            field=images[0].name.rpartition(".chunks")[0],
        )
    placed: list[PlacedPicture] = []
    taken = 0
    for image in images:
        digest = digest_in(image.location, image.name)
        found = known.get(digest)
        if found is None:
            raise RequestError("is not stored on this server any more; send the file", field=image.name)
        tokens = _tokens(image, found, sight)
        placed.append(PlacedPicture(image.before + taken, tokens, digest, found.format))
        taken += tokens
    places = np.repeat([image.before for image in images], [picture.tokens for picture in placed])
    return np.insert(text, places, sight.image_token_id), tuple(placed)


def _tokens(image: ImagePart, found: KnownPicture, sight: VisionConfig) -> int:
    if found.error is not None:
        raise RequestError(found.error, field=image.name)
    if image.format != found.format:
        raise RequestError(f"is {image.format!r}, and the file is {found.format!r}", field=f"{image.name}.format")
    if image.override not in (None, (found.width, found.height)):
        raise RequestError(
            f"is {image.override}, and the image has {found.width} x {found.height} pixels: resize it before it is "
            "sent",
            field=f"{image.name}.override_dimensions",
        )
    try:
        tokens = sight.tokens(found.width, found.height)
    except BadPicture as error:
        raise RequestError(str(error), field=image.name) from error
    if image.expected_tokens not in (None, tokens):
        raise RequestError(
            f"is {image.expected_tokens}, and this image of {found.width} x {found.height} pixels has {tokens} tokens",
            field=f"{image.name}.expected_tokens",
        )
    return tokens
