"""The key of an agent session: what it opens, that nobody else can make one, and what is left of it after a restart."""

from __future__ import annotations

from typing import Any

import pytest
from api_harness import BASE, Api, Serve

from skyrl.api.access import AgentKeys, tenant_of_key
from skyrl.api.app import create_app
from skyrl.api.routes.chats import PREFIXES
from skyrl.base.wire.errors import RequestError
from skyrl.storage.db.keys import ALL_SCOPES, SCOPES

ASKED = {
    *(("POST", f"{prefix}/chat/completions") for prefix in PREFIXES),
    *(("GET", f"{prefix}/models") for prefix in PREFIXES),
    *(("GET", f"{prefix}/models/{{model}}") for prefix in PREFIXES),
    ("POST", "/v1/messages"),
    ("POST", "/v1/messages/count_tokens"),
    ("POST", "/v1/responses"),
}
"""All that an agent may ask for."""
CHAT = {"model": "any", "messages": [{"role": "user", "content": "Hi"}]}
SECRET = b"s" * 32


async def key_of(api: Api, **headers: str) -> str:
    answer = await api.post("agent_sessions", {"model": BASE}, **headers)
    assert answer.status_code == 200, answer.text
    return answer.json()["key"]


async def test_an_agents_key_opens_nothing_but_turns_and_models(api: Api) -> None:
    key = await key_of(api)
    opened: set[tuple[str, str]] = set()
    for route in create_app(api.services).routes:
        path = route.path.replace("{model}", BASE).replace("{", "").replace("}", "")
        answer = await api.http.request(route.method, path, json={}, headers={"X-API-Key": key})
        if route.keyless:
            continue
        if answer.status_code == 403:
            assert "the key of an agent session can do nothing but" in answer.text, path
        else:
            assert answer.status_code in (200, 400), (path, answer.text)
            opened.add((route.method, route.path))
    assert opened == ASKED


@pytest.mark.parametrize("prefix", PREFIXES)
async def test_an_agents_key_is_taken_as_any_client_sends_it(api: Api, prefix: str) -> None:
    key = await key_of(api)
    for headers in ({"Authorization": f"Bearer {key}"}, {"x-api-key": key}):
        api.http.headers = headers  # without the tenant's own key
        answer = await api.http.get(f"{prefix}/models")
        assert answer.status_code == 200, answer.text
        assert BASE in [model["id"] for model in answer.json()["data"]]


async def test_an_agents_key_gives_nobody_the_tenants_weights(api: Api) -> None:
    session = (await api.post("create_session", {}, **{"X-API-Key": "tml-two"})).json()["session_id"]
    body = {"session_id": session, "model_seq_id": 1, "path": "tinker://s:train:0/weights/n"}
    answer = await api.post(
        "load_weights", body | {"weights_access_token": await key_of(api)}, **{"X-API-Key": "tml-two"}
    )
    assert (answer.status_code, answer.json()["field"]) == (403, "weights_access_token")


def changed(key: str) -> list[str]:
    """Keys that differ from this one in one place, and none of which its server made."""
    _, session, tenant, signature = key.split("-")
    other = "0" if signature[0] != "0" else "1"
    return [
        f"ska-{session}-{tenant}-{other}{signature[1:]}",
        f"ska-{session}-{tenant}-{signature[:-1]}",
        f"ska-{session}-{tenant}-{signature}0",
        f"ska-{session}-{tenant}-{signature.upper()}",
        f"ska-{session}-{tenant}-",
        f"ska-{session}-{tenant}",
        f"ska-{session}-{tenant_of_key('tml-two')}-{signature}",
        f"ska-{session[:-1]}-{tenant}-{signature}",
        f"ska-{session}{tenant[:1]}-{tenant[1:]}-{signature}",
        f"ska-{tenant}-{session}-{signature}",
        f"{key}-x",
        f"ska-{key}",
        "ska-",
        "ska---",
        f"ska-{session}-{tenant}-\xfc",
        AgentKeys(b"another server's secret").issue(session, tenant),
    ]


@pytest.mark.parametrize("keys", ["open", "managed"])
async def test_a_key_that_this_server_did_not_make_is_refused(serve: Serve, keys: str) -> None:
    async with serve() as api:
        key = await key_of(api)
    async with serve(api_keys=keys) as api:
        api.http.headers = {}
        for path, body in (("/v1/chat/completions", CHAT), ("/v1/messages", {}), ("/api/v1/agent_sessions", {})):
            for forged in changed(key):
                headers: Any = {"X-API-Key": forged.encode("latin-1")}
                answer = await api.http.post(path, json=body, headers=headers)
                assert answer.status_code == 401, (path, forged, answer.text)
                assert "was not made by this server" in answer.text


async def test_a_key_holds_after_a_restart_and_also_where_keys_are_managed(serve: Serve) -> None:
    async with serve() as api:
        key = await key_of(api)
    async with serve(api_keys="managed") as api:
        api.http.headers = {"X-API-Key": key}
        assert (await api.http.get("/v1/models")).status_code == 200


def test_a_key_has_its_session_and_tenant_and_is_short_enough_for_any_client() -> None:
    keys = AgentKeys(SECRET)
    session, tenant = "0123456789abcdef" * 2, tenant_of_key("tml-one")
    key = keys.issue(session, tenant)
    assert keys.read(key) == (session, tenant)
    assert len(key) < 200
    assert AgentKeys(SECRET).read(key) == (session, tenant), "of two processes of one server each reads the other's"
    with pytest.raises(RequestError) as caught:
        AgentKeys(b"t" * 32).read(key)
    assert caught.value.status == 401
    assert keys.issue("a", "b1") != keys.issue("a1", "b")


def test_the_operator_can_give_no_key_the_right_of_an_agent() -> None:
    assert "agent" not in SCOPES
    assert "agent" not in ALL_SCOPES
