"""Checks of single pictures for all routes, with the errors that clients see."""

from __future__ import annotations

from skyrl.base.pictures.picture import PictureFormat
from skyrl.base.wire.errors import RequestError
from skyrl.runtime.pictures.checker import NotChecked, PictureChecker, TooManyPictures
from skyrl.sampling.metrics import ImageMetrics

NOT_CHECKED_S = 5.0


class PictureChecks:
    """Of one API process, with one worker."""

    def __init__(self, metrics: ImageMetrics) -> None:
        self._checker = PictureChecker()
        self._metrics = metrics

    async def size(self, data: bytes, form: PictureFormat) -> tuple[int, int]:
        """Width and height in pixels. Raises BadPicture; and RequestError if too many pictures wait for their check
        (429), or if there is no worker (503)."""
        try:
            with self._metrics.check():
                return await self._checker.check(data, form)
        except TooManyPictures as error:
            raise RequestError(str(error), status=429, retry_after_s=error.retry_after_s) from error
        except NotChecked as error:
            raise RequestError(str(error), status=503, retry_after_s=NOT_CHECKED_S) from error

    async def close(self) -> None:
        """End the worker. May be called twice."""
        await self._checker.close()
