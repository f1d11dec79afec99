"""Who may use the admin routes."""

from __future__ import annotations

from typing import Any

import pytest

from skyrl.http.admin_key import AdminKey


def scope(client: str | None, **headers: str) -> dict[str, Any]:
    pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return {"client": None if client is None else (client, 1234), "headers": pairs}


@pytest.mark.parametrize("client", ["127.0.0.1", "127.8.0.1", "::1", "::ffff:127.0.0.1"])
def test_without_a_key_this_machine_may_ask(client: str) -> None:
    assert AdminKey(None).refusal(scope(client)) is None


@pytest.mark.parametrize("client", ["10.0.0.1", "::ffff:10.0.0.1", "2001:db8::1", None, "unix", "127.0.0.1.example"])
def test_without_a_key_nobody_else_may_ask(client: str | None) -> None:
    refusal = AdminKey(None).refusal(scope(client))
    assert refusal is not None
    assert refusal[0] == 403


@pytest.mark.parametrize("header", ["x_forwarded_for", "X_Real_IP", "forwarded"])
def test_a_request_through_a_proxy_is_not_from_this_machine(header: str) -> None:
    refusal = AdminKey(None).refusal(scope("127.0.0.1", **{header: "127.0.0.1"}))
    assert refusal is not None
    assert refusal[0] == 403


@pytest.mark.parametrize("given", [{}, {"authorization": "Bearer wrong"}, {"authorization": "secret"}])
def test_with_a_key_everybody_must_send_it(given: dict[str, str]) -> None:
    refusal = AdminKey("secret").refusal(scope("127.0.0.1", **given))
    assert refusal is not None
    assert refusal[0] == 401


def test_the_key_opens_the_routes_from_everywhere() -> None:
    key, with_key = AdminKey("secret"), scope("10.0.0.1", Authorization="Bearer secret")
    assert key.refusal(with_key) is None
    assert key.is_in(with_key["headers"])
    assert not AdminKey(None).is_in(with_key["headers"])
