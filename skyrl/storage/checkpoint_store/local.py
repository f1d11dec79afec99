"""The checkpoint store in a local or mounted directory: `<root>/<group>/<name>/`. A rename makes a directory appear at
once with all its files."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from skyrl.storage.checkpoint_store.base import (
    MANIFEST,
    OWNER,
    CountBytes,
    NotStored,
    StoredKey,
    StoreError,
    any_group,
    manifest_of,
    not_counted,
)
from skyrl.storage.checkpoint_store.directories import (
    atomic_directory,
    is_scratch,
    link_files,
    old_scratch,
    remove,
    remove_empty,
    sizes_of,
    subdirectories,
)

CHUNK_BYTES = 2**20


class LocalStore:
    """A copy shares the bytes of its source if the file system has hard links."""

    def __init__(self, root: Path, count: CountBytes = not_counted) -> None:
        self._root = root
        self._count = count

    @contextlib.contextmanager
    def writing(self, key: str) -> Iterator[Path]:
        remove(self._root / key)
        with self._filled(key) as directory:
            yield directory
            size = sum(sizes_of(directory).values())
        self._count("written", size)

    @contextlib.contextmanager
    def _filled(self, key: str) -> Iterator[Path]:
        with atomic_directory(self._root / key) as directory:
            yield directory
            (directory / MANIFEST).write_bytes(manifest_of(sizes_of(directory)))

    @contextlib.contextmanager
    def reading(self, key: str) -> Iterator[Path]:
        directory = self._existing(key)
        self._count("read", sum(sizes_of(directory).values()))
        yield directory

    def copy(self, source: str, key: str) -> None:
        directory = self._existing(source)
        try:
            with self._filled(key) as scratch:
                link_files(directory, scratch)
        except OSError:
            if not (self._root / key).is_dir():
                raise

    def files(self, key: str) -> dict[str, int]:
        return sizes_of(self._existing(key))

    def stream(self, key: str, file: str) -> Iterator[bytes]:
        try:
            stream = (self._existing(key) / file).open("rb")
        except FileNotFoundError as error:
            raise NotStored(f"{key} has no file {file!r}") from error

        def pieces() -> Iterator[bytes]:
            with stream:
                while piece := stream.read(CHUNK_BYTES):
                    self._count("read", len(piece))
                    yield piece

        return pieces()

    def sign(self, key: str, expires_in_s: float) -> dict[str, str] | None:
        return None

    def delete(self, key: str) -> None:
        remove(self._root / key)

    def stored(self) -> list[StoredKey]:
        return list(self.walk())

    def walk(self) -> Iterator[StoredKey]:
        for group in subdirectories(self._root):
            for path in subdirectories(group):
                try:
                    stored_at = path.stat().st_mtime
                except FileNotFoundError:  # deleted meanwhile
                    continue
                if not is_scratch(path):
                    yield StoredKey(f"{group.name}/{path.name}", stored_at)

    def remove_leftovers(self, before: float, wanted: Callable[[str], bool] = any_group) -> None:
        for group in subdirectories(self._root):
            old = old_scratch(group, before)
            for path in old if old and wanted(group.name) else ():
                remove(path)
            remove_empty(group)

    def owner(self) -> str | None:
        try:
            return (self._root / OWNER).read_text()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StoreError(f"{self._root / OWNER}: {error.strerror}") from error

    def claim(self, owner: str) -> str:
        file = self._root / OWNER
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            with file.open("x") as stream:
                stream.write(owner)
                stream.flush()
                os.fsync(stream.fileno())
        except FileExistsError:
            return file.read_text()
        except OSError as error:
            raise StoreError(f"{file}: {error.strerror}") from error
        return owner

    def _existing(self, key: str) -> Path:
        path = self._root / key
        if not path.is_dir():
            raise NotStored(f"{key} is not stored in {self._root}")
        return path
