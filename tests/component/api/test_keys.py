"""Managed API keys over HTTP: which keys are accepted, their scopes, their tenants, and their end."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import httpx
import pytest
from api_harness import BASE, Api, Serve, sample_body
from engine_harness import NEVER_S
from fake_upstream import FakeUpstream
from sqlalchemy import event, select

import skyrl.api.server
from skyrl.api.access import tenant_of_key, user_urn
from skyrl.storage.db import keys as key_rows
from skyrl.storage.db.database import Database
from skyrl.storage.db.keys import SCOPES, ApiKey, Scope, api_keys
from skyrl.storage.db.row_caches import Keys
from tests.postgres_server import ON_BOTH_SLOWLY

pytestmark = ON_BOTH_SLOWLY

CHECKPOINT = "training_runs/s:train:0/checkpoints/weights/n"


def make(database: Database, *scopes: Scope, tenant: str | None = None, expires_at: float | None = None):
    """A key, created as the operator creates it in another process."""
    return database.write(
        lambda c: key_rows.create(c, tenant=tenant, name="k", scopes=scopes or SCOPES, expires_at=expires_at)
    )


def end(database: Database, key: ApiKey) -> None:
    database.write(lambda c: key_rows.revoke(c, key.id))


async def get(api: Api, path: str, key: str) -> httpx.Response:
    return await api.http.get(f"/api/v1/{path}", headers={"X-API-Key": key})


async def token_of(api: Api, key: str) -> str:
    return (await api.post("auth/token", {}, **{"X-API-Key": key})).json()["jwt"]


def refused(answer: httpx.Response, status: int) -> str:
    """The sentence of a refusal. The refusal must not tell the SDK to get a new token."""
    assert answer.status_code == status, answer.text
    assert "WWW-Authenticate" not in answer.headers
    assert answer.json()["field"] is None
    return answer.json()["detail"]


async def test_only_created_keys_are_accepted(serve: Serve, database: Database) -> None:
    text, key = make(database)
    async with serve(api_keys="managed") as api:
        assert (await get(api, "sessions", text)).status_code == 200
        forged = [f"tml-{key.id}-{'x' * 43}", text[:-1], f"{text}x", text.replace("tml-", "tmx-"), key.id]
        for other in ["tml-one", "k\xfcche", *forged]:
            headers = {"X-API-Key": other.encode("latin-1")}
            answer = await api.http.get("/api/v1/sessions", headers=headers)  # pyright: ignore[reportArgumentType]
            assert "unknown here" in refused(answer, 401), other
        for path in ("client/config", "client/dynamic_config", "telemetry"):
            assert (await api.post(path, {})).status_code == 200, path


async def test_keys_of_one_tenant_share_its_sessions(serve: Serve, database: Database) -> None:
    one, key = make(database)
    two, _ = make(database, "sample", tenant=key.tenant)
    other, _ = make(database)
    async with serve(api_keys="managed") as api:
        session = (await api.post("create_session", {}, **{"X-API-Key": one})).json()["session_id"]
        assert (await get(api, "sessions", two)).json() == {"sessions": [session]}
        assert (await get(api, "sessions", other)).json() == {"sessions": []}
        assert (await get(api, f"sessions/{session}", other)).status_code == 404


async def test_a_running_server_soon_learns_of_created_and_revoked_keys(
    serve: Serve, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(skyrl.api.server, "KEYS_S", 0.01)
    read, refresh = asyncio.Event(), Keys.refresh

    async def refresh_and_notify(keys: Keys) -> None:
        await refresh(keys)
        read.set()

    async def next_reading() -> None:
        for _ in range(2):  # one read may already be running
            read.clear()
            await read.wait()

    monkeypatch.setattr(Keys, "refresh", refresh_and_notify)
    async with serve(api_keys="managed") as api:
        text, key = make(database)
        await next_reading()
        assert (await get(api, "sessions", text)).status_code == 200
        end(database, key)
        await next_reading()
        assert "was revoked" in refused(await get(api, "sessions", text), 401)


async def test_an_expired_key_is_refused_without_reading_the_database(
    serve: Serve, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, key = make(database, expires_at=time.time() + 3600)
    async with serve(api_keys="managed") as api:
        assert (await get(api, "sessions", text)).status_code == 200
        later = time.time() + 3601
        with monkeypatch.context() as clock:
            clock.setattr(key_rows.time, "time", lambda: later)
            assert refused(await get(api, "sessions", text), 401) == "this API key has expired"


async def test_a_token_ends_with_its_key(serve: Serve, database: Database) -> None:
    text, key = make(database, "sample")
    async with serve(api_keys="managed") as api:
        token = await token_of(api, text)
        assert (await get(api, "sessions", token)).status_code == 200
        assert "'admin'" in refused(await get(api, "audit", token), 403), "a token has the scopes of its key"
        end(database, key)
        await api.services.access.keys.refresh()
        answer = await get(api, "sessions", token)
        assert answer.status_code == 401
        assert answer.headers["WWW-Authenticate"] == 'Bearer error="invalid_token"', (
            "the client asks for another token, and is refused for good"
        )
        refused(await api.post("auth/token", {}, **{"X-API-Key": text}), 401)


async def test_a_token_from_before_managed_keys_is_refused(serve: Serve, database: Database) -> None:
    async with serve() as api:
        token = await token_of(api, "tml-one")
    async with serve(api_keys="managed") as api:
        assert (await get(api, "sessions", token)).headers["WWW-Authenticate"] == 'Bearer error="invalid_token"'


async def test_with_open_keys_a_created_key_still_stands_for_its_tenant(serve: Serve, database: Database) -> None:
    text, key = make(database, "sample", tenant=tenant_of_key("tml-one"))
    async with serve() as api:
        session = (await api.post("create_session", {})).json()["session_id"]
        assert (await get(api, "sessions", text)).json() == {"sessions": [session]}
        assert "'train'" in refused(await api.post("optim_step", {}, **{"X-API-Key": text}), 403)
        assert (await get(api, "sessions", "tml-anything")).status_code == 200


# Scopes

ROUTES_BY_SCOPE: dict[Scope | None, list[tuple[str, str]]] = {
    "train": [
        ("POST", "create_model"),
        ("POST", "forward_backward"),
        ("POST", "copy_weights"),
        ("DELETE", CHECKPOINT),
        ("DELETE", f"{CHECKPOINT}/publish"),
        ("PUT", f"{CHECKPOINT}/ttl"),
        ("GET", f"{CHECKPOINT}/archive"),
    ],
    "sample": [("POST", "create_sampling_session"), ("POST", "asample"), ("POST", "retrieve_futures")],
    "admin": [("GET", "audit"), ("GET", "billing/usage/checkpoints/current")],
    None: [("POST", "retrieve_future"), ("GET", "sessions"), ("GET", "checkpoints"), ("GET", "auth/apikey/me")],
}


@pytest.mark.parametrize("held", SCOPES)
async def test_a_key_may_use_exactly_the_routes_of_its_scope(serve: Serve, database: Database, held: Scope) -> None:
    text, _ = make(database, held)
    async with serve(api_keys="managed") as api:
        for needed, routes in ROUTES_BY_SCOPE.items():
            for method, path in routes:
                answer = await api.http.request(method, f"/api/v1/{path}", json={}, headers={"X-API-Key": text})
                if needed in (held, None):
                    assert answer.status_code in (200, 400, 404), path
                else:
                    refusal = refused(answer, 403)
                    assert repr(needed) in refusal, path
                    assert refusal.endswith(f"has: {held}"), path


async def test_only_a_key_with_the_scope_train_gives_access_to_its_tenants_weights(
    serve: Serve, database: Database
) -> None:
    mine, _ = make(database)
    source = {"source_path": "tinker://s:train:0/weights/n", "destination_project_id": "p"}
    theirs, _ = make(database, "train")
    samples, _ = make(database, "sample")
    past, _ = make(database, expires_at=time.time() - 60)
    async with serve(api_keys="managed") as api:
        token = await token_of(api, theirs)
        for given, status, reason in (
            (theirs, 404, "no checkpoint"),
            (token, 404, "no checkpoint"),
            (samples, 403, "weights_access_token: this needs an API key with the scope 'train'"),
            (past, 403, "weights_access_token: this API key has expired"),
            ("tml-unknown", 403, "weights_access_token: this API key is unknown"),
            (token[:-4], 403, "weights_access_token: has expired, is no longer accepted, or was not made by"),
        ):
            body = source | {"weights_access_token": given}
            answer = await api.post("copy_weights", body, **{"X-API-Key": mine})
            assert (answer.status_code, reason in answer.json()["detail"]) == (status, True), answer.text


# Answers about a key, and its deletion


async def test_a_key_can_read_its_name_scopes_and_expiry(serve: Serve, database: Database) -> None:
    text, key = make(database, "train", "sample", expires_at=time.time() + 3600)
    async with serve(api_keys="managed") as api:
        answer = (await get(api, "auth/apikey/me", text)).json()
        assert (answer["key_id"], answer["name"]) == (int(key.id, 16), "k")
        assert "train, sample" in answer["note"]
        assert text[-43:] not in str(answer)
        assert user_urn(key.tenant) == f"tml:user:{key.tenant}"


async def test_a_key_that_deletes_itself_is_refused_at_once(serve: Serve, database: Database) -> None:
    text, key = make(database, "sample")
    async with serve(api_keys="managed") as api:
        answer = await api.http.delete("/api/v1/auth/apikey/me", headers={"X-API-Key": text})
        assert answer.status_code == 200
        refused(await get(api, "sessions", text), 401)
    assert database.read(lambda c: c.execute(select(api_keys.c.revoked_at)).scalar_one()) is not None


async def test_the_last_use_of_a_key_is_recorded_to_the_minute(serve: Serve, database: Database) -> None:
    used, key = make(database)
    make(database)
    before = time.time()
    async with serve(api_keys="managed") as api:
        await get(api, "sessions", used)
    noted = dict(database.read(lambda c: list(c.execute(select(api_keys.c.id, api_keys.c.last_used_at)))))
    at = noted.pop(key.id)
    assert at % 60 == 0
    assert before - 60 < at <= time.time()
    assert list(noted.values()) == [None]


# Cost of authentication


async def test_a_caller_is_authenticated_without_reading_the_database(
    serve: Serve, database: Database, upstream: FakeUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This also holds while the keys cannot be read: the keys of the last read stay valid."""
    monkeypatch.setattr(skyrl.api.server, "KEYS_S", NEVER_S)  # the test alone reads them
    text, key = make(database)
    async with serve(api_keys="managed") as api:
        access = api.services.access
        token = await token_of(api, text)
        here, statements = threading.get_ident(), list[tuple[int, str]]()

        def note(*arguments: Any) -> None:
            statements.append((threading.get_ident(), arguments[2]))

        for engine in (access.keys._database.reader, access.keys._database.writer):
            event.listen(engine, "before_cursor_execute", note)
        for given in (text, token):
            assert access.caller(given).tenant == key.tenant
        assert here not in {thread for thread, _ in statements}, "the background reads on threads of its own"
        headers = {"X-API-Key": text}
        sampler = await api.sampler(**headers)

        async def unreadable(*_: Any) -> None:
            raise OSError("the disk is gone")

        monkeypatch.setattr(access.keys._database, "read_async", unreadable)
        with pytest.raises(OSError, match="disk"):
            await access.keys.refresh()
        promise = await api.post("asample", sample_body(sampler, 1, base_model=BASE), **headers)
        assert promise.status_code == 200
        assert (await api.result(promise.json()["request_id"], **headers)).status_code == 200
        assert not [statement for _, statement in statements if "FROM api_keys" in statement]
