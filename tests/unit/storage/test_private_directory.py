"""The directories for sockets, secrets and state: only the server's user may enter them. The temporary directory has a
short path and is removed at exit or at the next start.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from skyrl.base.config.loading import load_config
from skyrl.base.config.server import ConfigError
from skyrl.cli.launcher.state_dir import lock_state_dir, private_directory
from skyrl.runtime.processes.runtime import Runtime
from skyrl.storage.db.database import Database
from skyrl.storage.db.migrate import migrate
from tests.log_lines import logged_lines


def test_only_its_user_may_enter_the_private_directory_and_exit_removes_it(tmp_path: Path) -> None:
    with private_directory(tmp_path) as directory:
        assert directory.stat().st_mode & 0o777 == 0o700
        assert (tmp_path / "run").resolve() == directory.resolve()
        (directory / "api.sock").touch()
    assert not directory.exists()
    assert list(tmp_path.iterdir()) == []


def test_the_next_start_removes_the_directory_of_a_killed_launcher(tmp_path: Path) -> None:
    old_directory = Path(tempfile.mkdtemp(prefix="skyrl-"))
    (tmp_path / "run").symlink_to(old_directory)
    with private_directory(tmp_path) as directory:
        assert directory != old_directory
        assert not old_directory.exists()


def test_a_start_in_a_copied_state_directory_keeps_the_directory_of_the_living_server(tmp_path: Path) -> None:
    original, copy = tmp_path / "original", tmp_path / "copy"
    original.mkdir()
    with private_directory(original) as living_directory:
        shutil.copytree(original, copy, symlinks=True)
        with private_directory(copy) as directory:
            assert directory != living_directory
        assert living_directory.is_dir()


def test_a_socket_path_fits_although_the_temporary_directory_has_a_long_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with private_directory(tmp_path) as directory:
        assert len(str(directory / "01234567-0123-0123-0123-0123456789ab")) < 108


def test_restore_makes_a_removed_private_directory_again(tmp_path: Path) -> None:
    directory = tmp_path / "private"
    directory.mkdir(0o700)
    runtime = Runtime(load_config({"state_dir": tmp_path}), directory, None, "secret")
    written = runtime.write().read_bytes()
    shutil.rmtree(directory)
    runtime.restore()
    assert directory.stat().st_mode & 0o777 == 0o700
    assert (directory / "runtime.json").read_bytes() == written
    runtime.restore()  # restoring an intact directory is no error
    directory.chmod(0o755)
    runtime.restore()
    assert directory.stat().st_mode & 0o777 == 0o700


def test_no_secret_is_written_into_another_users_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime(load_config({"state_dir": tmp_path}), tmp_path / "private", None, "secret")
    runtime.directory.mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: runtime.directory.stat().st_uid + 1)
    with pytest.raises(PermissionError, match="another user's"):
        runtime.restore()
    assert list(runtime.directory.iterdir()) == []


@pytest.mark.parametrize("state_dir", ["file", "file/below"])
def test_an_unwritable_state_directory_is_refused_in_one_line(tmp_path: Path, state_dir: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"state-dir: cannot write to .*file"):
        lock_state_dir(tmp_path / state_dir)


@pytest.fixture
def umask_zero() -> Iterator[None]:
    """New files and directories are open to everybody, unless they are made with a mode."""
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.usefixtures("umask_zero")
def test_only_its_user_may_enter_a_new_state_directory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with lock_state_dir(tmp_path / "by" / "serve"):
        pass
    with closing(Database(f"sqlite:///{tmp_path / 'by' / 'keys' / 'skyrl.db'}")) as database:
        migrate(database)
    assert [(tmp_path / "by" / name).stat().st_mode & 0o777 for name in ("serve", "keys")] == [0o700, 0o700]
    assert logged_lines(caplog) == []


def test_an_open_state_directory_keeps_its_mode_and_the_log_warns(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tmp_path.chmod(0o750)
    with lock_state_dir(tmp_path):
        assert tmp_path.stat().st_mode & 0o777 == 0o750
    assert f"chmod 700 {tmp_path}" in caplog.text
