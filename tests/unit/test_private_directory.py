"""Where a server keeps sockets, secrets and its state: for its user alone; what is temporary is short, and gone with it
or with the next start."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from skyrl.config.server import ConfigError, load_config
from skyrl.db.database import Database
from skyrl.db.migrate import migrate
from skyrl.launcher.state_dir import lock_state_dir, private_directory
from skyrl.processes.runtime import Runtime


def test_only_its_user_may_enter_and_nothing_is_left_at_exit(tmp_path: Path) -> None:
    with private_directory(tmp_path) as directory:
        assert directory.stat().st_mode & 0o777 == 0o700
        assert (tmp_path / "run").resolve() == directory.resolve()
        (directory / "api.sock").touch()
    assert not directory.exists()
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_launcher_left_goes_with_the_next_start(tmp_path: Path) -> None:
    left = Path(tempfile.mkdtemp(prefix="skyrl-"))
    (tmp_path / "run").symlink_to(left)
    with private_directory(tmp_path) as directory:
        assert directory != left
        assert not left.exists()


def test_a_copy_of_the_state_of_a_living_server_leaves_it_alone(tmp_path: Path) -> None:
    original, copy = tmp_path / "original", tmp_path / "copy"
    original.mkdir()
    with private_directory(original) as living:
        shutil.copytree(original, copy, symlinks=True)
        with private_directory(copy) as directory:
            assert directory != living
        assert living.is_dir()


def test_a_socket_fits_however_long_the_path_of_temporary_files_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with private_directory(tmp_path) as directory:
        assert len(str(directory / "01234567-0123-0123-0123-0123456789ab")) < 108


def test_what_was_tidied_away_is_there_again(tmp_path: Path) -> None:
    directory = tmp_path / "private"
    directory.mkdir(0o700)
    runtime = Runtime(load_config({"state_dir": tmp_path}), directory, None, "secret")
    written = runtime.write().read_bytes()
    shutil.rmtree(directory)
    runtime.restore()
    assert directory.stat().st_mode & 0o777 == 0o700
    assert (directory / "runtime.json").read_bytes() == written
    runtime.restore()  # nothing was missing


def test_no_secret_goes_into_a_directory_that_another_user_has_made_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = Runtime(load_config({"state_dir": tmp_path}), tmp_path / "private", None, "secret")
    runtime.directory.mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: runtime.directory.stat().st_uid + 1)
    with pytest.raises(PermissionError, match="another user's"):
        runtime.restore()
    assert list(runtime.directory.iterdir()) == []


@pytest.mark.parametrize("state_dir", ["file", "file/below"])
def test_a_state_directory_that_cannot_be_written_to_is_told_in_a_line(tmp_path: Path, state_dir: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"state-dir: cannot write to .*file"):
        lock_state_dir(tmp_path / state_dir)


@pytest.fixture
def generous() -> Iterator[None]:
    """What is made may be read and written by everybody, unless its maker says otherwise."""
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.usefixtures("generous")
def test_only_its_user_may_enter_a_state_directory_that_is_made(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with lock_state_dir(tmp_path / "by" / "serve"):
        pass
    with closing(Database(f"sqlite:///{tmp_path / 'by' / 'keys' / 'skyrl.db'}")) as database:
        migrate(database)
    assert [(tmp_path / "by" / name).stat().st_mode & 0o777 for name in ("serve", "keys")] == [0o700, 0o700]
    assert caplog.text == ""


def test_a_state_directory_that_others_may_enter_is_left_so_and_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tmp_path.chmod(0o750)
    with lock_state_dir(tmp_path):
        assert tmp_path.stat().st_mode & 0o777 == 0o750
    assert f"chmod 700 {tmp_path}" in caplog.text
