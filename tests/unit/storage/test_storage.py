"""Checkpoint stores: tests that run on the local directory and on S3, then tests of each, then archives."""

from __future__ import annotations

import gzip
import io
import os
import tarfile
import threading
import time
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import obstore
import pytest

from skyrl.base.config.loading import load_config
from skyrl.base.config.server import ConfigError
from skyrl.storage.checkpoint_store import local, objects
from skyrl.storage.checkpoint_store.archive import Member, gzip_size, gzip_stored, tar, tar_size
from skyrl.storage.checkpoint_store.base import MANIFEST, CheckpointStore, NotStored, StoreError, manifest_of, sizes_in
from skyrl.storage.checkpoint_store.directories import (
    atomic_directory,
    fetch,
    id_of,
    link_tree,
    remove,
    remove_empty,
    safe_name,
)
from skyrl.storage.checkpoint_store.local import LocalStore
from skyrl.storage.checkpoint_store.objects import readable_error
from skyrl.storage.checkpoint_store.registry import open_store

KEY = f"{safe_name('s1:train:0')}/name-0123"
LARGE = os.urandom(11 * 2**20 + 7)
FILES = {"a.bin": b"first", "empty": b"", "large.bin": LARGE}


def make_store(url: str | None, options: dict[str, str], state_dir: Path) -> CheckpointStore:
    return open_store(
        load_config({"state_dir": state_dir, "checkpoint_store": url, "checkpoint_store_options": options})
    )


@pytest.fixture(params=["default", "file", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> CheckpointStore:
    if request.param == "default":
        return make_store(None, {}, tmp_path)
    if request.param == "file":
        return make_store(f"file://{tmp_path}/a%20store", {}, tmp_path / "state")
    bucket = request.getfixturevalue("new_bucket")()
    return make_store(bucket.url, bucket.options, tmp_path)


@pytest.fixture
def s3(new_bucket: Callable[[], Any], tmp_path: Path) -> objects.ObjectStore:
    bucket = new_bucket()
    store = make_store(bucket.url, bucket.options, tmp_path)
    assert isinstance(store, objects.ObjectStore)
    return store


def write(store: CheckpointStore, key: str = KEY, files: dict[str, bytes] = FILES) -> None:
    with store.writing(key) as directory:
        assert list(directory.iterdir()) == []
        for name, content in files.items():
            (directory / name).write_bytes(content)


def read(store: CheckpointStore, key: str = KEY) -> dict[str, bytes]:
    with store.reading(key) as directory:
        return {file.name: file.read_bytes() for file in directory.iterdir() if file.name != MANIFEST}


def keys(store: CheckpointStore) -> list[str]:
    return sorted(found.key for found in store.stored())


def test_files_are_read_back_as_they_were_written(store: CheckpointStore, tmp_path: Path) -> None:
    started = time.time()
    write(store)
    assert read(store) == FILES
    assert store.files(KEY) == {name: len(content) for name, content in FILES.items()}
    for name, content in FILES.items():
        pieces = list(store.stream(KEY, name))
        assert b"".join(pieces) == content
        assert all(pieces)
        assert max(map(len, pieces), default=0) < 2**22, "a stream never holds a whole file in memory"
    (found,) = store.stored()
    assert found.key == KEY
    assert started - 2 < found.stored_at < time.time() + 2
    fetch(store, KEY, tmp_path / "here" / "adapter")
    assert {file.name for file in (tmp_path / "here" / "adapter").iterdir()} == set(FILES)


def test_a_checkpoint_appears_only_when_it_is_complete(store: CheckpointStore) -> None:
    def write_half() -> None:
        with store.writing(KEY) as directory:
            (directory / "a.bin").write_bytes(b"half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        write_half()
    assert store.stored() == []
    with store.writing(KEY) as directory:
        (directory / "a.bin").write_bytes(b"x")
        assert store.stored() == []
        with pytest.raises(NotStored):
            store.files(KEY)
    assert keys(store) == [KEY]


def test_a_second_write_replaces_the_first(store: CheckpointStore) -> None:
    write(store)
    write(store, files={"b.bin": b"second"})
    assert read(store) == {"b.bin": b"second"}


def test_a_missing_checkpoint_or_file_raises_not_stored(store: CheckpointStore, tmp_path: Path) -> None:
    for action in (
        lambda: read(store),
        lambda: store.files(KEY),
        lambda: store.stream(KEY, "a.bin"),
        lambda: store.copy(KEY, "x/y"),
        lambda: fetch(store, KEY, tmp_path / "fetched"),
    ):
        with pytest.raises(NotStored):
            action()
    assert not (tmp_path / "fetched").exists()
    assert store.stored() == []
    store.delete(KEY)
    write(store)
    with pytest.raises(NotStored):
        store.stream(KEY, "c.bin")


def test_a_copy_and_its_source_are_deleted_independently(store: CheckpointStore) -> None:
    write(store)
    for number in range(2):
        store.copy(KEY, f"other/{number}")
    assert keys(store) == sorted([KEY, "other/0", "other/1"])
    store.delete(KEY)
    assert keys(store) == ["other/0", "other/1"]
    store.delete("other/0")
    assert read(store, "other/1") == FILES
    store.delete("other/1")
    assert store.stored() == []


def test_a_copy_that_another_caller_has_made_meanwhile_stays_as_it_is(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node may be fetching it."""
    write(store)
    store.copy(KEY, "other/1")

    def deleted(*_: object) -> None:
        raise AssertionError("the copy was gone for a moment")

    monkeypatch.setattr(local, "remove", deleted)
    monkeypatch.setattr(store, "delete", deleted)
    store.copy(KEY, "other/1")
    assert read(store, "other/1") == FILES


def test_bytes_that_are_written_and_read_are_counted_and_copies_are_not(store: CheckpointStore) -> None:
    counted: list[tuple[str, int]] = []
    vars(store)["_count"] = lambda direction, size: counted.append((direction, size))
    write(store)
    store.copy(KEY, "other/1")
    size = sum(map(len, FILES.values()))
    assert counted == [("written", size)]
    assert b"".join(store.stream(KEY, "large.bin")) == LARGE
    read(store, "other/1")
    assert sum(size for direction, size in counted if direction == "read") == len(LARGE) + size


def test_deleting_a_key_keeps_keys_that_begin_with_it(store: CheckpointStore) -> None:
    for key in ("m/a", "m/a-1", "mm/a"):
        write(store, key, {"f": key.encode()})
    store.delete("m/a")
    assert keys(store) == ["m/a-1", "mm/a"]
    assert read(store, "m/a-1") == {"f": b"m/a-1"}


def test_keys_of_long_and_special_names_are_stored(store: CheckpointStore) -> None:
    key = f"{safe_name('s/1:train:0 ä%')}/{safe_name('n' * 180)}"
    write(store, key, {"adapter_model.safetensors.age": b"x"})
    assert keys(store) == [key]
    assert read(store, key) == {"adapter_model.safetensors.age": b"x"}


def test_a_checkpoint_with_a_scratch_like_name_is_no_leftover(store: CheckpointStore) -> None:
    """A name may begin as scratch directories do. `skyrl.engine.saving` appends the save's id to the name."""
    names = [".tmp-best", f".tmp-{'0' * 16}", ".tmp-"]
    expected = sorted(f"model/{safe_name(name)}-{'0' * 12}" for name in names)
    for key in expected:
        write(store, key, {"f": b"x"})
    store.remove_leftovers(time.time() + 60)
    assert keys(store) == expected


def test_a_checkpoint_store_belongs_to_the_first_server_that_claims_it(store: CheckpointStore) -> None:
    assert store.claim("one") == "one"
    assert store.claim("two") == "one"
    assert store.claim("one") == "one"
    assert store.stored() == []


def test_old_leftovers_are_removed_and_checkpoints_stay(store: CheckpointStore) -> None:
    write(store)
    writing = store.writing("left/behind")
    directory = writing.__enter__()
    (directory / "a.bin").write_bytes(b"half")
    store.remove_leftovers(time.time() - 600)
    assert (directory / "a.bin").exists(), "a save may still write to this directory"
    store.remove_leftovers(time.time() + 60)
    assert not directory.exists()
    assert keys(store) == [KEY]
    with suppress(Exception):
        writing.__exit__(None, None, None)


def test_several_threads_fetch_the_same_checkpoint_at_once(store: CheckpointStore, tmp_path: Path) -> None:
    write(store)
    failures: list[Exception] = []

    def run() -> None:
        try:
            fetch(store, KEY, tmp_path / "fetched")
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert {file.name: file.read_bytes() for file in (tmp_path / "fetched").iterdir()} == FILES
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".tmp-")] == []


@pytest.mark.parametrize("exists", [False, True])
def test_an_atomic_directory_is_made_although_a_sweep_deletes_its_empty_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exists: bool
) -> None:
    target, mkdir, swept = tmp_path / "parent" / "target", Path.mkdir, list[Path]()
    if exists:
        target.parent.mkdir()

    def swept_after(directory: Path, *rest: Any, **options: Any) -> None:
        mkdir(directory, *rest, **options)
        if directory == target.parent and not swept:
            swept.append(directory)
            remove_empty(directory)

    monkeypatch.setattr(Path, "mkdir", swept_after)
    with atomic_directory(target) as scratch:
        (scratch / "file").write_text("x")
    assert swept
    assert (target / "file").read_text() == "x"


def test_a_manifest_lists_the_files_and_sizes() -> None:
    assert sizes_in(manifest_of({"b": 2, "a": 0})) == {"a": 0, "b": 2}
    for other in (b"", b"[]", b'{"files": ["a"]}', b'{"files": {"a": "1"}}'):
        with pytest.raises((ValueError, TypeError)):
            sizes_in(other)


# The local directory


def test_local_copies_are_hard_links(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    write(store)
    store.copy(KEY, "other/1")
    assert (tmp_path / "other" / "1" / "large.bin").stat().st_nlink == 2
    assert store.sign(KEY, 60) is None


def test_local_directories_without_a_manifest_are_read(tmp_path: Path) -> None:
    (tmp_path / KEY).mkdir(parents=True)
    (tmp_path / KEY / "state.json").write_text("{}")
    store = LocalStore(tmp_path)
    assert read(store) == {"state.json": b"{}"}
    assert keys(store) == [KEY]


def test_an_atomic_directory_appears_only_when_it_is_complete(tmp_path: Path) -> None:
    target = tmp_path / "parent" / "target"

    def write_half() -> None:
        with atomic_directory(target) as scratch:
            (scratch / "half").write_text("x")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        write_half()
    assert list(target.parent.iterdir()) == []
    with atomic_directory(target) as scratch:
        (scratch / "file").write_text("x")
        assert not target.exists()
        os.utime(scratch, (0, 0))  # the directory looks as if its files had taken long to write
    assert {file.name: file.read_bytes() for file in target.iterdir()} == {"file": b"x"}
    assert target.stat().st_mtime > time.time() - 60, "the sweeper counts the age of the directory from its appearance"
    assert [path.name for path in target.parent.iterdir()] == ["target"]
    remove(target)
    remove(target)
    assert list(target.parent.iterdir()) == []


@pytest.mark.parametrize("name", ["s1:train:0", "a/../b", "100%=1", "ä\n", "x@2"])
def test_any_id_is_turned_into_a_file_name_and_back(name: str) -> None:
    assert id_of(safe_name(name)) == name
    assert not set(safe_name(name)) & set("/%\n: ")


# The object store


def objects_in(store: objects.ObjectStore) -> list[str]:
    return sorted(str(item["path"]) for batch in obstore.list(store._store) for item in batch)


def test_the_manifest_is_written_last_and_deleted_first(
    s3: objects.ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An upload or a deletion that is killed between any two requests leaves nothing that looks complete."""
    put, delete, killed = obstore.put, obstore.delete, ConnectionError("killed")
    for allowed in range(len(FILES) + 1):
        remaining = iter(range(allowed))

        def put_some(*arguments: Any, remaining: Any = remaining, **options: Any) -> Any:
            if next(remaining, None) is None:
                raise killed
            return put(*arguments, **options)

        with monkeypatch.context() as patch:
            patch.setattr(obstore, "put", put_some)
            with pytest.raises(StoreError, match="killed"):
                write(s3)
        assert len(objects_in(s3)) == allowed
        assert s3.stored() == []
        with pytest.raises(NotStored):
            s3.files(KEY)
    write(s3)

    def delete_once(*arguments: Any) -> None:
        delete(*arguments)
        raise killed

    with monkeypatch.context() as patch:
        patch.setattr(obstore, "delete", delete_once)
        with pytest.raises(StoreError):
            s3.delete(KEY)
    assert s3.stored() == []
    s3.delete(KEY)
    assert objects_in(s3) == []


def test_objects_of_a_crashed_upload_are_removed_after_the_upload_time(
    s3: objects.ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(s3)
    obstore.put(s3._store, "crashed/upload/a.bin", b"x")
    s3.remove_leftovers(time.time() + 60)
    assert "crashed/upload/a.bin" in objects_in(s3), "the upload may still be running"
    monkeypatch.setattr(objects, "UPLOAD_S", -60.0)
    s3.remove_leftovers(time.time() + 60)
    assert not any(path.startswith("crashed/") for path in objects_in(s3))
    assert read(s3) == FILES


def test_uploads_to_groups_that_are_not_wanted_are_not_removed(
    s3: objects.ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for group in ("mine", "others"):
        obstore.put(s3._store, f"{group}/upload/a.bin", b"x")
    monkeypatch.setattr(objects, "UPLOAD_S", -60.0)
    s3.remove_leftovers(time.time() + 60, lambda group: group == "mine")
    assert objects_in(s3) == ["others/upload/a.bin"]


def test_a_download_of_the_wrong_size_is_refused(s3: objects.ObjectStore) -> None:
    write(s3)
    obstore.put(s3._store, f"{KEY}/large.bin", LARGE[:-1])
    with pytest.raises(StoreError, match=r"large\.bin has .* bytes, not"):
        read(s3)


def test_signed_urls_need_no_credentials_and_expire(s3: objects.ObjectStore) -> None:
    write(s3)
    urls = s3.sign(KEY, 60)
    assert urls is not None
    assert urls.keys() == FILES.keys()
    for name, url in urls.items():
        assert "X-Amz-Expires=60" in url
        with urllib.request.urlopen(url) as answer:
            assert answer.read() == FILES[name]
    with pytest.raises(NotStored):
        s3.sign("no/thing", 60)


def test_a_missing_bucket_is_named_by_every_operation(new_bucket: Callable[[], Any], tmp_path: Path) -> None:
    bucket = new_bucket()
    store = make_store("s3://no-such-bucket/x", bucket.options, tmp_path)
    sentence = f"there is no bucket 'no-such-bucket' at {bucket.options['endpoint']}"
    actions = (
        lambda: write(store),
        lambda: read(store),
        lambda: store.claim("me"),
        lambda: store.stored(),
        lambda: store.copy(KEY, "other/key"),
        lambda: store.delete(KEY),
    )
    for action in actions:
        with pytest.raises(StoreError) as raised:
            action()
        assert str(raised.value) == sentence
        assert not isinstance(raised.value, NotStored), "a missing bucket does not mean that the checkpoint was deleted"
    assert list((tmp_path / "scratch").iterdir()) == []


S3_REFUSAL = (
    "Generic S3 error: Error performing PUT https://s3.local:9000/models/a/b in 8.2ms - Server returned non-2xx status "
    'code: 403 Forbidden: <?xml version="1.0" encoding="utf-8"?>\n<Error>\n<Code>AccessDenied</Code><Message>Access '
    "Denied</Message>\n<RequestId>f</RequestId></Error>\n\nDebug source:\nGeneric {\n"
)
AZURE = (
    "Object at location x/k not found: Error performing GET https://a.blob.core.windows.net/models/x/k in 9ms - Server "
    "returned non-2xx status code: 404 The specified container does not exist.: <Error><Code>ContainerNotFound</Code>"
)
AWAY = (
    "Generic S3 error: Error performing GET http://127.0.0.1:1/modelz/x/k in 8.4s, after 10 retries, max_retries: 10, "
    "retry_timeout: 180s  - HTTP error: error sending request"
)


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        (S3_REFUSAL, "the store at https://s3.local:9000 answers PUT with 403 Forbidden: AccessDenied, Access Denied"),
        (AZURE, "there is no bucket 'models' at https://a.blob.core.windows.net"),
        (f"{AWAY}\n\nDebug source:\nGeneric {{", AWAY),
        ("Generic error: 502 Bad Gateway: <html><body>\nno</body></html>", "Generic error: 502 Bad Gateway"),
    ],
)
def test_errors_of_object_stores_become_one_sentence(message: str, sentence: str) -> None:
    assert readable_error(message, "models") == sentence


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"checkpoint_store": "/a/directory"}, "checkpoint_store: '/a/directory' is not file:///directory or one of"),
        ({"checkpoint_store": "ftp://host/x"}, "checkpoint_store: 'ftp://host/x' is not"),
        ({"checkpoint_store": "s3://"}, "checkpoint_store: 's3://' is not"),
        ({"checkpoint_store": "file://relative"}, "checkpoint_store: 'file://relative' is not"),
        (
            {"checkpoint_store": "s3://bucket/x", "checkpoint_store_options": {"regoin": "x"}},
            "checkpoint_store: Configuration key: 'regoin' is not valid",
        ),
    ],
)
def test_an_invalid_checkpoint_store_is_refused(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        open_store(load_config({"state_dir": tmp_path, **settings}))
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("gs://bucket/prefix", {}),
        ("az://container/prefix", {"account_name": "account", "account_key": "a2V5"}),
    ],
)
def test_google_and_azure_stores_are_opened_by_url(tmp_path: Path, url: str, options: dict[str, str]) -> None:
    assert isinstance(make_store(url, options, tmp_path), objects.ObjectStore)


# Archives


def archived(files: dict[str, bytes], cut: int = 1000) -> list[bytes]:
    def pieces(content: bytes) -> list[bytes]:
        return [content[start : start + cut] for start in range(0, len(content), cut)]

    return list(tar([Member(name, len(content), pieces(content)) for name, content in files.items()], 1_700_000_000.9))


def unpacked(archive: bytes) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(archive)) as opened:
        assert all(member.isfile() and member.mtime == 1_700_000_000 for member in opened.getmembers())
        files = {name: opened.extractfile(name) for name in opened.getnames()}
        return {name: file.read() for name, file in files.items() if file is not None}


@pytest.mark.parametrize("sizes", [[], [0], [1], [511, 512, 513], [65_535], [65_536, 3], [2**20 + 1]])
def test_archives_hold_the_files_and_have_the_computed_size(sizes: list[int]) -> None:
    files = {f"file-{number}": os.urandom(size) for number, size in enumerate(sizes)}
    archive = b"".join(archived(files))
    assert len(archive) == tar_size(sizes)
    assert unpacked(archive) == files
    compressed = b"".join(gzip_stored(archived(files)))
    assert len(compressed) == gzip_size(len(archive))
    assert gzip.decompress(compressed) == archive
    assert unpacked(compressed) == files


def test_a_gzip_archive_does_not_depend_on_how_the_pieces_are_cut() -> None:
    files = {"file": os.urandom(300_000)}
    assert len({b"".join(gzip_stored(archived(files, cut))) for cut in (7_000, 65_535, 200_000)}) == 1


@pytest.mark.parametrize("content", [b"short", b"longer than 10"])
def test_an_archive_of_a_file_with_another_size_raises(content: bytes) -> None:
    with pytest.raises(ValueError, match="file has .* bytes, not 10"):
        list(tar([Member("file", 10, [content])], 0.0))


def test_a_linked_tree_keeps_its_folders_and_outlives_its_source(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    with atomic_directory(source) as scratch:
        (scratch / "rank0" / "deep").mkdir(parents=True)
        (scratch / "rank0" / "deep" / "shard").write_bytes(b"zero")
        (scratch / "index").write_bytes(b"one")
    with atomic_directory(target) as scratch:
        link_tree(source, scratch)
    assert (target / "rank0/deep/shard").stat().st_ino == (source / "rank0/deep/shard").stat().st_ino
    remove(source)
    assert (target / "rank0/deep/shard").read_bytes() == b"zero"
    assert (target / "index").read_bytes() == b"one"
