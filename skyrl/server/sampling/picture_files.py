"""Where the forwarding client gets the files of a job's pictures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from skyrl.base.pictures.picture import Pictures


class PictureFiles(Protocol):
    """The stored files of pictures."""

    async def read(self, pictures: Pictures) -> Mapping[str, bytes]:
        """The files of a job's pictures, by digest. Raises FailedRequest if one is not stored any more."""
        ...
