"""Where a server keeps sockets and secrets: for its user alone, short, and gone with it or with the next start."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest

from skyrl.launcher import private_directory


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
