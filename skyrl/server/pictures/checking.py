"""The check of one picture for a request, with the errors that a client sees."""

from __future__ import annotations

from skyrl.base.pictures.picture import PictureFormat
from skyrl.base.wire.errors import RequestError
from skyrl.runtime.pictures.checker import NotChecked, PictureChecker, TooManyPictures

NOT_CHECKED_S = 5.0


async def size_in_pixels(checker: PictureChecker, data: bytes, form: PictureFormat) -> tuple[int, int]:
    """Width and height. Raises BadPicture; and RequestError if too many pictures wait for their check (429), or if
    there is no worker (503)."""
    try:
        return await checker.check(data, form)
    except TooManyPictures as error:
        raise RequestError(str(error), status=429, retry_after_s=error.retry_after_s) from error
    except NotChecked as error:
        raise RequestError(str(error), status=503, retry_after_s=NOT_CHECKED_S) from error
