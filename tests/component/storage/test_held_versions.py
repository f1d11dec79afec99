"""Versions that are in memory until their files are on the disk, with processes that are killed at each moment. The
memory is a real tmpfs."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from skyrl.storage.checkpoint_store import held as module
from skyrl.storage.checkpoint_store.base import MANIFEST
from skyrl.storage.checkpoint_store.directories import remove
from skyrl.storage.checkpoint_store.held import SHARED_MEMORY, HeldVersions, NotHere, leads_nowhere
from skyrl.storage.checkpoint_store.local import LocalStore

FILES = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"weights" * 1000}
MOST_BYTES = 10_000


def write(directory: Path) -> None:
    for name, content in FILES.items():
        (directory / name).write_bytes(content)


def contents(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir()}


def links(directory: Path) -> int:
    return sum(file.is_symlink() for file in directory.iterdir())


@pytest.fixture
def state(tmp_path: Path) -> Path:
    (tmp_path / "state").mkdir()
    return tmp_path / "state"


@pytest.fixture
def version(state: Path) -> Path:
    return state / "adapters" / "model" / "v000001"


@pytest.fixture
def memory(state: Path) -> Iterator[Path]:
    """The directory in memory of this state directory."""
    held = HeldVersions(state)
    yield held._memory
    shutil.rmtree(held._memory, ignore_errors=True)


def left_in(memory: Path) -> list[Path]:
    return list(memory.glob("adapters/*/*/*"))


def test_a_version_is_read_at_one_path_before_and_after_its_copy(state: Path, version: Path, memory: Path) -> None:
    held = HeldVersions(state)
    sizes = held.write(version, MOST_BYTES, write)
    assert sizes == {name: len(content) for name, content in FILES.items()}
    assert links(version) == len(FILES)
    assert contents(version) == FILES
    assert memory.parent == SHARED_MEMORY
    assert memory.stat().st_mode & 0o777 == 0o700
    held.copy(version)
    assert links(version) == 0
    assert contents(version) == FILES
    assert not memory.exists()
    assert [path.name for path in version.parent.iterdir()] == [version.name], "no half-written directory is left"


DIES = """
import os, signal, sys
from pathlib import Path
from skyrl.storage.checkpoint_store import directories, held
from skyrl.storage.checkpoint_store.local import LocalStore
from tests.component.storage.test_held_versions import write

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

state, moment = Path(sys.argv[1]), sys.argv[2]
versions = held.HeldVersions(state, store=LocalStore(state / "store") if "store" in moment else None)
directory = state / "adapters" / "model" / "v000001"

def write_and_die(memory):
    write(memory)
    die()

versions.write(directory, 10_000, write_and_die if moment == "before the links" else write)
if moment == "during the copy":
    held.sync = die
elif moment == "during the copy to the store":
    directories.link_files = die
elif moment == "before the stored version leaves":
    held.remove = die
elif moment == "before the memory is free":
    versions._free = die
if not moment.startswith("before the copy"):
    versions.copy(directory)
die()
"""
MOMENTS = ["before the links", "before the copy", "during the copy", "before the memory is free"]


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_process_that_is_killed_loses_nothing(state: Path, version: Path, memory: Path, moment: str) -> None:
    root = Path(__file__).parents[3]
    died = subprocess.run([sys.executable, "-c", DIES, str(state), moment], cwd=root, check=False)
    assert died.returncode == -signal.SIGKILL
    assert left_in(memory), "something is in memory"
    if moment != "before the links":
        assert contents(version) == FILES, "vLLM reads it meanwhile"
    HeldVersions(state).copy_all()
    assert left_in(memory) == []
    if moment == "before the links":
        assert not version.exists(), "no row can name it"
    else:
        assert links(version) == 0
        assert contents(version) == FILES


IN_STORE = [
    "before the copy to the store",
    "during the copy to the store",
    "before the stored version leaves",
]


@pytest.mark.parametrize("moment", IN_STORE)
def test_a_process_that_is_killed_on_the_way_to_the_store_loses_nothing(
    state: Path, version: Path, memory: Path, moment: str
) -> None:
    died = subprocess.run([sys.executable, "-c", DIES, str(state), moment], cwd=Path(__file__).parents[3], check=False)
    assert died.returncode == -signal.SIGKILL
    assert contents(version) == FILES, "nodes get it meanwhile"
    store = LocalStore(state / "store")
    HeldVersions(state, store=store).copy_all()
    with store.reading("adapters-model/v000001") as directory:
        assert {name: content for name, content in contents(directory).items() if name != MANIFEST} == FILES
    assert left_in(memory) == []
    assert not version.exists()


def test_after_a_failed_copy_no_version_is_held_until_it_succeeds(state: Path, version: Path, memory: Path) -> None:
    held = HeldVersions(state, store=LocalStore(state / "store"))
    (state / "store").write_bytes(b"a file")
    assert held.write(version, MOST_BYTES, write) is not None
    with pytest.raises(OSError, match="store"):
        held.copy(version)
    second = version.with_name("v000002")
    assert held.write(second, MOST_BYTES, write) is None
    (state / "store").unlink()
    held.copy_all()
    assert held.write(second, MOST_BYTES, write) is not None
    assert contents(second) == FILES


def test_a_version_without_room_is_not_held(
    state: Path, version: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert HeldVersions(state, tmpfs=None).write(version, MOST_BYTES, write) is None
    assert HeldVersions(state, tmpfs=state / "missing").write(version, MOST_BYTES, write) is None
    held = HeldVersions(state)
    with monkeypatch.context() as patched:
        patched.setattr(module, "MOST_BYTES", MOST_BYTES + 1)
        assert held.write(version, MOST_BYTES, write) is not None
        second = version.with_name("v000002")
        assert held.write(second, MOST_BYTES, write) is None, "the first one is still held"
        held.copy(version)
        assert held.write(second, MOST_BYTES, write) is not None
    held.copy_all()
    free = os.statvfs(SHARED_MEMORY)
    too_much = free.f_bavail * free.f_frsize
    monkeypatch.setattr(module, "MOST_BYTES", 2 * too_much)
    assert held.write(version.with_name("v000003"), too_much, write) is None


def test_a_write_that_fails_leaves_nothing(state: Path, version: Path, memory: Path) -> None:
    def full(directory: Path) -> None:
        write(directory)
        raise OSError("no space left")

    held = HeldVersions(state)
    assert held.write(version, MOST_BYTES, full) is None
    assert left_in(memory) == []
    assert not version.exists()
    assert held.write(version, MOST_BYTES, write) is not None


def test_memory_that_others_can_write_to_is_not_used(state: Path, version: Path, memory: Path) -> None:
    memory.mkdir(mode=0o777)
    memory.chmod(0o777)
    (memory / "adapters" / "model" / "v000001").mkdir(parents=True)
    held = HeldVersions(state)
    assert held.write(version, MOST_BYTES, write) is None
    held.copy_all()
    assert (memory / "adapters" / "model" / "v000001").exists(), "it is another user's"


def test_a_version_that_was_deleted_meanwhile_is_forgotten(state: Path, version: Path, memory: Path) -> None:
    held = HeldVersions(state)
    assert held.write(version, MOST_BYTES, write) is not None
    remove(version)
    held.copy(version)
    assert left_in(memory) == []
    assert not version.exists()


def test_a_copy_that_failed_is_made_later(
    state: Path, version: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = HeldVersions(state)
    assert held.write(version, MOST_BYTES, write) is not None

    def full(*_: object) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "copyfile", full)
        with pytest.raises(OSError, match="no space left"):
            held.copy(version)
        held.copy_all()
        assert contents(version) == FILES
        assert links(version) == len(FILES)
    held.copy_all()
    assert links(version) == 0


def test_a_loss_of_power_leaves_links_that_lead_nowhere(state: Path, version: Path, memory: Path) -> None:
    held = HeldVersions(state)
    assert held.write(version, MOST_BYTES, write) is not None
    assert not leads_nowhere(version)
    shutil.rmtree(memory)
    with pytest.raises(NotHere):
        leads_nowhere(version)
    os.utime(version, (0, 0))
    assert leads_nowhere(version)
    HeldVersions(state).copy_all()
    assert leads_nowhere(version)


def test_the_memory_of_a_state_directory_that_is_gone_is_freed(state: Path, version: Path, memory: Path) -> None:
    assert HeldVersions(state).write(version, MOST_BYTES, write) is not None
    other = state.with_name("other")
    other.mkdir()
    HeldVersions(other).copy_all()
    assert left_in(memory), "its server may be running"
    shutil.rmtree(state)
    HeldVersions(other).copy_all()
    assert left_in(memory), "its disk may be away"
    os.utime(memory, (0, 0))
    HeldVersions(other).copy_all()
    assert left_in(memory), "its server, in another container, has just written it"
    for path in (memory, *memory.rglob("*")):
        os.utime(path, (0, 0))
    HeldVersions(other).copy_all()
    assert not memory.exists()


def test_another_state_directory_at_the_same_path_has_memory_of_its_own(
    state: Path, version: Path, memory: Path
) -> None:
    """Two containers with one tmpfs: neither may free what the other holds."""
    assert HeldVersions(state).write(version, MOST_BYTES, write) is not None
    state.rename(state.with_name("in another container"))
    state.mkdir()
    HeldVersions(state).copy_all()
    assert left_in(memory)


def test_what_a_process_replaced_and_did_not_sync_is_synced_before_its_memory_is_free(
    state: Path, version: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = HeldVersions(state)
    assert held.write(version, MOST_BYTES, write) is not None
    for link in [*version.iterdir()]:
        content = link.read_bytes()
        link.unlink()
        link.write_bytes(content)
    synced: list[tuple[Path, bool]] = []
    monkeypatch.setattr(module, "sync", lambda path: synced.append((path, memory.exists())))
    held.copy(version)
    assert synced == [(version, True), (version.parent, True)]
    assert not memory.exists()


def test_links_that_cannot_be_made_leave_no_half_written_directory(
    state: Path, version: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(Path, "symlink_to", full)
    assert HeldVersions(state).write(version, MOST_BYTES, write) is None
    assert list(version.parent.iterdir()) == []
    assert left_in(memory) == []
