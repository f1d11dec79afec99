"""Which network interface has an address."""

from __future__ import annotations

import socket

import psutil

from skyrl.runtime.processes.ports import interface_of


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
