"""The files of a job's pictures, for the forwarding client."""

from __future__ import annotations

from collections.abc import Mapping

from skyrl.base.pictures.picture import Pictures
from skyrl.base.wire.errors import FailedRequest
from skyrl.storage.db.pictures import PictureFiles


class StoredPictureFiles:
    """Reads them from the database; those that were used last are in memory."""

    def __init__(self, files: PictureFiles) -> None:
        self._files = files

    async def read(self, pictures: Pictures) -> Mapping[str, bytes]:
        """By digest. Raises FailedRequest if one is not stored any more."""
        digests = {picture.digest for picture in pictures.placed}
        found = await self._files.read_async(pictures.tenant, digests)
        if len(found) < len(digests):
            raise FailedRequest("an image of this request is not stored any more")
        return found
