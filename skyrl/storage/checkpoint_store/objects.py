"""The checkpoint store on S3, Google Cloud Storage or Azure, by obstore: `<url>/<group>/<name>/<file>`.

`readable_error` makes one line of an error of obstore, without XML and debugging output.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import BaseError
from obstore.store import from_url

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
    sizes_in,
)
from skyrl.storage.checkpoint_store.directories import old_scratch, remove, scratch_in, sizes_of

_NO_BUCKET = re.compile(r"NoSuchBucket|ContainerNotFound|specified (?:bucket|container) does not exist", re.IGNORECASE)
_HOST = re.compile(r"https?://[^/\s]+")
_STATUS = re.compile(r"Error performing (?P<method>[A-Z]+) .*?non-2xx status code: (?P<status>\d+[^:<]*)", re.DOTALL)
_CODE, _MESSAGE = (re.compile(f"<{tag}>([^<]*)</{tag}>") for tag in ("Code", "Message"))
_MARKUP = re.compile(r"<[?!]?[A-Za-z].*", re.DOTALL)


def names_no_bucket(text: str) -> bool:
    """Whether an error says that the bucket itself does not exist, and not only an object in it."""
    return _NO_BUCKET.search(text) is not None


def readable_error(text: str, bucket: str) -> str:
    """One line for the error `text` about a bucket of this name."""
    text = text.partition("Debug source:")[0].strip()
    host = _HOST.search(text)
    at = "" if host is None else f" at {host[0]}"
    if names_no_bucket(text):
        return f"there is no bucket {bucket!r}{at}"
    status, code = _STATUS.search(text), _CODE.search(text)
    if status is not None and code is not None:
        message = _MESSAGE.search(text)
        error = code[1] if message is None else f"{code[1]}, {message[1]}"
        return f"the store{at} answers {status['method']} with {status['status'].strip()}: {error}"
    return _MARKUP.sub("", text).partition("\n")[0].rstrip(" :")


CHUNK_BYTES = 2**20
UPLOAD_S = 86_400.0
"""Files without a manifest are not deleted before this time: the upload may still be running."""
CLIENT_OPTIONS = frozenset(
    {"allow_http", "allow_invalid_certificates", "connect_timeout", "proxy_url", "root_certificate", "timeout"}
)
"""Options of the HTTP client. All other options are the store's own (`endpoint`, `region`, `access_key_id`...)."""


class ObjectStore:
    """`scratch` is a local directory for files before their upload and after their download. Credentials come from
    `options`, or from the environment variables that the provider's own tools read.

    Raises StoreError for a wrong URL and for wrong options.
    """

    def __init__(self, url: str, options: Mapping[str, str], scratch: Path, count: CountBytes = not_counted) -> None:
        client = {name: value for name, value in options.items() if name in CLIENT_OPTIONS}
        config = {name: value for name, value in options.items() if name not in CLIENT_OPTIONS}
        if any("endpoint" in name and value.startswith("http://") for name, value in config.items()):
            client.setdefault("allow_http", "true")
        client.setdefault("timeout", "300s")  # of one request, which may be the download of a whole file
        try:
            # obstore checks the names of the options; its types list them as literals, hence the casts.
            self._store = from_url(url, config=cast(Any, config), client_options=cast(Any, client))
        except (BaseError, ValueError) as error:
            raise StoreError(str(error).partition("\n")[0]) from error
        self._url = url
        self._bucket = urlsplit(url).netloc
        self._scratch = scratch
        self._count = count

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Turns errors of obstore into StoreError or NotStored, with a readable message. A missing bucket is a
        StoreError: the store is away, and nothing is known about its files."""
        try:
            yield
        except (BaseError, OSError) as error:
            text = str(error)
            missing = isinstance(error, FileNotFoundError) and not names_no_bucket(text)
            raise (NotStored if missing else StoreError)(readable_error(text, self._bucket)) from error

    @contextlib.contextmanager
    def writing(self, key: str) -> Iterator[Path]:
        with self._directory() as directory:
            yield directory
            sizes = sizes_of(directory)
            self.delete(key)
            with self._explained():
                for name in sizes:
                    obstore.put(self._store, f"{key}/{name}", directory / name)
                obstore.put(self._store, f"{key}/{MANIFEST}", manifest_of(sizes))
        self._count("written", sum(sizes.values()))

    @contextlib.contextmanager
    def reading(self, key: str) -> Iterator[Path]:
        sizes = self.files(key)
        with self._directory() as directory:
            for name, size in sizes.items():
                with (directory / name).open("wb") as target:
                    for piece in self.stream(key, name):
                        target.write(piece)
                    if target.tell() != size:
                        raise StoreError(f"{self._url}/{key}/{name} has {target.tell()} bytes, not {size}")
            yield directory

    def copy(self, source: str, key: str) -> None:
        sizes = self.files(source)
        with self._explained():
            for name in sizes:
                obstore.copy(self._store, f"{source}/{name}", f"{key}/{name}")
            obstore.put(self._store, f"{key}/{MANIFEST}", manifest_of(sizes))

    def files(self, key: str) -> dict[str, int]:
        with self._explained():
            manifest = bytes(obstore.get(self._store, f"{key}/{MANIFEST}").bytes())
        return sizes_in(manifest)

    def stream(self, key: str, file: str) -> Iterator[bytes]:
        with self._explained():
            answer = obstore.get(self._store, f"{key}/{file}")

        def pieces() -> Iterator[bytes]:
            with self._explained():
                for piece in answer.stream(min_chunk_size=CHUNK_BYTES):
                    self._count("read", len(piece))
                    yield bytes(piece)

        return pieces()

    def sign(self, key: str, expires_in_s: float) -> dict[str, str] | None:
        names = list(self.files(key))
        with self._explained():
            paths = [f"{key}/{name}" for name in names]
            # from_url may make a store that cannot sign, hence the cast; the stores of skyrl's schemes can.
            urls = obstore.sign(cast(Any, self._store), "GET", paths, timedelta(seconds=expires_in_s))
        return dict(zip(names, urls, strict=True))

    def delete(self, key: str) -> None:
        with self._explained():
            paths = [str(item["path"]) for batch in obstore.list(self._store, f"{key}/") for item in batch]
            manifest = [path for path in paths if path.endswith(f"/{MANIFEST}")]
            for some_paths in (manifest, [path for path in paths if path not in manifest]):
                if some_paths:
                    obstore.delete(self._store, some_paths)

    def stored(self) -> list[StoredKey]:
        return [StoredKey(key, newest) for key, (newest, complete) in self._listed().items() if complete]

    def walk(self) -> Iterator[StoredKey]:
        return iter(self.stored())

    def remove_leftovers(self, before: float, wanted: Callable[[str], bool] = any_group) -> None:
        for path in old_scratch(self._scratch, before):
            remove(path)
        end = min(before, time.time() - UPLOAD_S)
        for key, (newest, complete) in self._listed().items():
            if not complete and newest < end and wanted(key.partition("/")[0]):
                self.delete(key)

    def owner(self) -> str | None:
        with self._explained():
            try:
                return bytes(obstore.get(self._store, OWNER).bytes()).decode()
            except FileNotFoundError:
                return None

    def claim(self, owner: str) -> str:
        if (marked := self.owner()) is not None:
            return marked
        with self._explained():
            obstore.put(self._store, OWNER, owner.encode())
        return owner

    def _listed(self) -> dict[str, tuple[float, bool]]:
        """By key: when its newest object was stored, and whether it has a manifest."""
        keys: dict[str, tuple[float, bool]] = {}
        with self._explained():
            for batch in obstore.list(self._store):
                for item in batch:
                    key, _, name = str(item["path"]).rpartition("/")
                    if key.count("/") == 1:
                        newest, complete = keys.get(key, (0.0, False))
                        stored_at = item["last_modified"].timestamp()
                        keys[key] = (max(newest, stored_at), complete or name == MANIFEST)
        return keys

    @contextlib.contextmanager
    def _directory(self) -> Iterator[Path]:
        directory = scratch_in(self._scratch)
        directory.mkdir(parents=True)
        try:
            yield directory
        finally:
            shutil.rmtree(directory, ignore_errors=True)
