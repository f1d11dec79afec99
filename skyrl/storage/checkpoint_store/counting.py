"""A checkpoint store that counts the bytes that go to it and come from it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

from skyrl.runtime.metrics.storage import TrafficMetrics
from skyrl.storage.checkpoint_store.base import CheckpointStore, StoredKey, any_group


class CountingStore:
    """As `store`. Downloads by signed URLs and copies within the store do not come through here."""

    def __init__(self, store: CheckpointStore, traffic: TrafficMetrics) -> None:
        self._store = store
        self._traffic = traffic

    @contextmanager
    def writing(self, key: str) -> Generator[Path]:
        size = 0
        with self._store.writing(key) as directory:
            yield directory
            size = _size(directory)
        self._traffic.written.inc(size)

    @contextmanager
    def reading(self, key: str) -> Generator[Path]:
        with self._store.reading(key) as directory:
            self._traffic.read.inc(_size(directory))
            yield directory

    def stream(self, key: str, file: str) -> Iterator[bytes]:
        for piece in self._store.stream(key, file):
            self._traffic.read.inc(len(piece))
            yield piece

    def copy(self, source: str, key: str) -> None:
        self._store.copy(source, key)

    def files(self, key: str) -> dict[str, int]:
        return self._store.files(key)

    def sign(self, key: str, expires_in_s: float) -> dict[str, str] | None:
        return self._store.sign(key, expires_in_s)

    def delete(self, key: str) -> None:
        self._store.delete(key)

    def stored(self) -> list[StoredKey]:
        return self._store.stored()

    def remove_leftovers(self, before: float, wanted: Callable[[str], bool] = any_group) -> None:
        self._store.remove_leftovers(before, wanted)

    def claim(self, owner: str, instead_of: str | None = None) -> str:
        return self._store.claim(owner, instead_of)


def _size(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.iterdir())
