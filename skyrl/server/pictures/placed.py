"""The prompt of a sample request with pictures."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from skyrl.base.pictures.picture import Pictures
from skyrl.base.pictures.vision import KnownPicture, NoVision, VisionConfig, place
from skyrl.base.wire.errors import RequestError
from skyrl.base.wire.sample_request import LOCATION, Chunk, ModelInput, SampleRequest, text_and_images
from skyrl.storage.db import pictures as rows
from skyrl.storage.db.database import Database


def is_text(prompt: ModelInput) -> bool:
    """Whether all chunks are text. Quick for the one chunk that most prompts have."""
    chunks = prompt.chunks
    return (len(chunks) == 1 and chunks[0].tokens is not None) or all(chunk.tokens is not None for chunk in chunks)


def seeing(sight: VisionConfig | NoVision, name: str) -> VisionConfig:
    """Raises RequestError naming the image if the base model takes text only."""
    if isinstance(sight, NoVision):
        raise RequestError(f"is an image, and the base model takes text only: {sight}", field=name)
    return sight


def place_images(
    request: SampleRequest, known: Mapping[str, KnownPicture], sight: VisionConfig, tenant: str
) -> Pictures:
    """Replace the chunks of the request's prompt by one of tokens, in which the pictures have their places. Raises
    RequestError that names the chunk."""
    text, images = text_and_images(request.prompt)
    try:
        array = np.asarray(text, np.int64)
    except OverflowError as error:
        raise RequestError("token ids must fit 64 bits", field="prompt") from error
    tokens, placed = place(array, images, known, sight)
    request.prompt.chunks[:] = [Chunk(tokens=tokens.tolist())]
    return Pictures(tenant, sight.image_token_id, placed)


async def place_stored(
    request: SampleRequest, database: Database, sight: VisionConfig | NoVision, tenant: str
) -> Pictures:
    """`place_images` of a stored request, whose files were taken out before."""
    images = text_and_images(request.prompt)[1]
    sight = seeing(sight, images[0].name)
    digests = [image.location.removeprefix(LOCATION) for image in images]
    known = await database.read_async(lambda c: rows.find(c, tenant, digests))
    return place_images(request, known, sight, tenant)
