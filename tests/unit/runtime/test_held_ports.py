"""Sockets that a server listens on, and the network interfaces of this machine's addresses."""

from __future__ import annotations

import socket

import psutil
import pytest

from skyrl.base.config.server import ConfigError
from skyrl.runtime.processes.ports import free_port, interface_of, listen


def test_a_server_listens_on_every_address_of_a_name() -> None:
    port = free_port()
    sockets = listen("localhost", port)
    try:
        assert {opened.getsockname()[0] for opened in sockets} <= {"127.0.0.1", "::1"}
        for opened in sockets:
            with socket.create_connection(
                opened.getsockname()[:2], timeout=60
            ):  # no process accepts the connection yet
                pass
    finally:
        for opened in sockets:
            opened.close()


def test_answers_are_sent_at_once() -> None:
    """asyncio turns Nagle's algorithm off where an accepted connection names its protocol."""
    (opened,) = listen("127.0.0.1", 0)
    with opened, socket.create_connection(opened.getsockname(), timeout=60):
        accepted, _ = opened.accept()
        with accepted:
            assert accepted.proto == socket.IPPROTO_TCP


def test_addresses_of_other_machines_and_unknown_names_are_refused() -> None:
    for host in ("192.0.2.1", "no-such-host.invalid"):
        with pytest.raises(ConfigError, match=f"port: cannot listen on {host}:"):
            listen(host, free_port())


def test_no_socket_stays_open_if_one_address_is_taken() -> None:
    port = free_port()
    (taken, *others) = listen("127.0.0.1", port)
    assert others == []
    with pytest.raises(ConfigError, match="Address already in use"):
        listen("localhost", port)
    taken.close()
    for opened in listen("localhost", port):
        opened.close()


def test_each_address_of_this_machine_has_its_interface() -> None:
    names = {
        entry.address.partition("%")[0]: name
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6)
    }
    assert names["127.0.0.1"] == "lo"
    assert {address: interface_of(address) for address in names} == names


def test_what_is_no_address_of_this_machine_has_none() -> None:
    assert interface_of("192.0.2.1") is None, "a documentation address is nobody's"
    assert interface_of("a name") is None
