"""Images in requests to an API process."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

CHECK_BOUNDS = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10)


class ImageMetrics:
    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        about = "Different images of each request."
        images = Counter("skyrl_images", about, ["outcome"], registry=registry)
        self._stored, self._known, self._faulty = (images.labels(each) for each in ("stored", "known", "faulty"))
        self._waiting = Gauge("skyrl_images_in_check", "Images that are checked or wait for it.", registry=registry)
        about = "Time of one check, with the wait for its turn."
        self._seconds = Histogram("skyrl_image_check_seconds", about, buckets=CHECK_BOUNDS, registry=registry)

    def taken(self, stored: int, known: int, faulty: int) -> None:
        """The images of one request: new files, files that were stored before, and files that are no images."""
        self._stored.inc(stored)
        self._known.inc(known)
        self._faulty.inc(faulty)

    @contextmanager
    def check(self) -> Generator[None]:
        began = time.perf_counter()
        self._waiting.inc()
        try:
            yield
        finally:
            self._waiting.dec()
            self._seconds.observe(time.perf_counter() - began)
