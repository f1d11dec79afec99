"""The pictures of training passes, read from the database."""

from __future__ import annotations

from skyrl.base.pictures.vision import NoVision, VisionConfig, place
from skyrl.base.wire.errors import FailedRequest, RequestError
from skyrl.base.wire.sample_request import LOCATION
from skyrl.base.wire.training import ForwardBackward
from skyrl.storage.db import pictures as rows
from skyrl.storage.db.database import Database
from skyrl.storage.db.pictures import PictureFiles
from skyrl.trainer.protocol import Datum


class PassPictures:
    """`sight`: how the base model sees."""

    def __init__(self, database: Database, sight: VisionConfig | NoVision) -> None:
        self._database = database
        self._files = PictureFiles(database)
        self._sight = sight

    def data_of(self, decoded: ForwardBackward, tenant: str) -> tuple[list[Datum], dict[str, bytes]]:
        """The data of a pass, and by digest the files of their pictures. Raises RequestError naming the chunk, and
        FailedRequest if a file is not stored any more. Reads nothing for a pass of text alone."""
        images = [image for of_datum in decoded.images for image in of_datum]
        if not images:
            pairs = zip(decoded.tokens, decoded.loss_inputs, strict=True)
            return [Datum(tokens, inputs) for tokens, inputs in pairs], {}
        if isinstance(self._sight, NoVision):
            raise RequestError(f"is an image, and the base model takes text only: {self._sight}", field=images[0].name)
        named = {image.location.removeprefix(LOCATION) for image in images}
        known = self._database.read(lambda c: rows.find(c, tenant, named))
        data: list[Datum] = []
        for text, of_datum, inputs in zip(decoded.tokens, decoded.images, decoded.loss_inputs, strict=True):
            tokens, pictures = place(text, of_datum, known, self._sight) if of_datum else (text, ())
            data.append(Datum(tokens, inputs, pictures))
        files = self._files.read(tenant, known)
        if len(files) < len(known):
            raise FailedRequest("an image of this request is not stored any more")
        return data, files
