"""Which Ray cluster `ray_address` means, and the sentences for one that cannot be used. Starts no cluster."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from skyrl.base.config.server import ConfigError
from skyrl.runtime.ray_cluster import connection
from skyrl.runtime.ray_cluster.connection import NoCluster, check_reachable, find_address, split


@pytest.fixture(autouse=True)
def _no_cluster_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))


def test_an_address_is_taken_as_it_is():
    assert find_address("head:6379") == "head:6379"


def test_auto_is_the_environment_before_the_cluster_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text("10.0.0.1:6379")
    assert find_address("auto") == "10.0.0.1:6379"
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.2:6380")
    assert find_address("auto") == "10.0.0.2:6380"


def test_auto_without_a_cluster_says_what_to_do():
    with pytest.raises(NoCluster, match="RAY_ADDRESS is not set and this machine is no node"):
        find_address("auto")


def test_a_client_server_in_the_environment_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RAY_ADDRESS", "ray://head:10001")
    with pytest.raises(ConfigError, match="RAY_ADDRESS: 'ray://head:10001' is not HOST:PORT"):
        find_address("auto")


def test_nothing_listens():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(NoCluster, match=rf"no Ray cluster answers at {address} \(Connection refused\)"):
            check_reachable(address)


def test_ray_is_not_installed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(connection, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"Ray is not installed: pip install 'skyrl\[ray\]'"):
        connection.check_installed()


def test_a_thread_that_is_left_after_the_end_does_not_connect_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "environ", dict(os.environ))
    asked: list[str] = []
    stub = SimpleNamespace(init=lambda **_: asked.append(os.environ["RAY_ENABLE_AUTO_CONNECT"]))
    monkeypatch.setitem(sys.modules, "ray", stub)
    monkeypatch.setattr(connection, "check_installed", lambda: None)
    monkeypatch.setattr(connection, "check_reachable", lambda _: None)
    connection.connect("127.0.0.2:1", namespace="tests")
    assert asked == ["0"], "set before Ray is imported"


def test_other_versions_are_named():
    error = connection._explained("h:1", RuntimeError("Version mismatch: The cluster was started with:\n    Ray: 9\n"))
    assert isinstance(error, ConfigError)
    assert "need the same versions of Ray and Python. The cluster was started with: Ray: 9" in str(error)


def test_a_machine_that_is_no_node():
    error = connection._explained("h:1", RuntimeError("No node info found matching attributes: ''"))
    assert isinstance(error, NoCluster)
    assert "run `ray start --address=h:1` here" in str(error)


def test_hosts_with_colons():
    assert split("[::1]:6379") == ("::1", 6379)
