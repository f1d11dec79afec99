"""API keys and tokens: which key a token stands for, when it expires, and what the routes reveal about a key."""

from __future__ import annotations

import base64
import json
import logging
import stat
import time
from pathlib import Path

import httpx
import jwt
import pytest
from api_harness import Api, Serve

from skyrl.api import access
from skyrl.api.access import MAX_KEY, Tokens, tenant_of_key, user_urn


def claims(token: str) -> dict[str, object]:
    """The claims as the SDK reads them, without checking the signature."""
    payload = token.split(".")[1]
    return json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))


async def token_of(api: Api, key: str = "tml-one") -> str:
    answer = await api.post("auth/token", {}, **{"X-API-Key": key})
    assert answer.status_code == 200, answer.text
    return answer.json()["jwt"]


async def my_sessions(api: Api, key: str) -> httpx.Response:
    return await api.http.get("/api/v1/sessions", headers={"X-API-Key": key})


async def test_a_token_stands_for_its_key_for_an_hour_even_after_a_restart(serve: Serve) -> None:
    async with serve() as api:
        session = (await api.post("create_session", {})).json()["session_id"]
        token = await token_of(api)
        token_claims = claims(token)
        tenant = tenant_of_key("tml-one")
        assert {name: token_claims[name] for name in ("sub", "org_id", "email")} == {
            "sub": user_urn(tenant),
            "org_id": tenant,
            "email": "",
        }
        assert abs(int(str(token_claims["iat"])) - time.time()) < 60
        assert int(str(token_claims["exp"])) - int(str(token_claims["iat"])) == 3600
        assert (await my_sessions(api, token)).json() == {"sessions": [session]}
        assert (await my_sessions(api, await token_of(api, "tml-two"))).json() == {"sessions": []}
    async with serve() as api:
        assert (await my_sessions(api, token)).json() == {"sessions": [session]}


async def test_a_token_asked_for_with_a_token_is_the_same_token(api: Api) -> None:
    token = await token_of(api)
    assert await token_of(api, token) == token


def signed(secret: bytes, **changes: object) -> str:
    good = {"iss": "passport-skyrl", "sub": user_urn("someone"), "iat": int(time.time()), "exp": int(time.time()) + 600}
    return jwt.encode({name: value for name, value in (good | changes).items() if value is not None}, secret, "HS256")


async def test_a_refused_token_makes_the_client_get_a_new_one(
    api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = (tmp_path / "token-secret").read_bytes()
    assert (await my_sessions(api, signed(secret))).status_code == 200
    unsigned = jwt.encode({"iss": "passport-skyrl", "sub": user_urn("x"), "iat": 1, "exp": 2**40}, "", "none")
    bad = [
        signed(b"another secret, that is thirty-two bytes"),
        signed(secret, exp=int(time.time()) - 1),
        signed(secret, exp=None),
        signed(secret, sub=None),
        signed(secret, iss="somebody"),
        unsigned,
        "eyJhbGciOiJIUzI1NiJ9.e30.x",
    ]
    for token in bad:
        answer = await my_sessions(api, token)
        assert answer.status_code == 401, token
        assert answer.headers["WWW-Authenticate"] == 'Bearer error="invalid_token"'
        assert "token" in answer.json()["detail"]
    monkeypatch.setattr(access, "LIFETIME_S", -1)
    assert "expired" in (await my_sessions(api, await token_of(api))).json()["detail"]


async def test_a_missing_key_is_not_reported_as_an_invalid_token(api: Api) -> None:
    answer = await my_sessions(api, "")
    assert answer.status_code == 401
    assert "WWW-Authenticate" not in answer.headers


async def test_a_key_has_a_maximum_length(api: Api) -> None:
    assert (await my_sessions(api, "k" * MAX_KEY)).status_code == 200
    answer = await my_sessions(api, "k" * (MAX_KEY + 1))
    assert (answer.status_code, "www-authenticate" in answer.headers) == (401, False)
    assert "kkk" not in answer.text


async def test_a_longer_key_is_kept_nowhere(api: Api, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "skyrl")
    access._caller_of_unlisted.cache_clear()
    long = "k" * (MAX_KEY + 1)
    into = {"session_id": "s", "model_seq_id": 0, "path": "tinker://s:train:0/weights/n"}
    for body in (into, {"source_path": into["path"], "destination_project_id": "mine"}):
        route = "load_weights" if body is into else "copy_weights"
        answer = await api.post(route, body | {"weights_access_token": long})
        assert (answer.status_code, answer.json()["field"]) == (403, "weights_access_token")
    assert (await api.http.get("/nowhere", headers={"X-API-Key": long})).status_code == 404
    assert "(key kkkkkkkk...)" in caplog.text
    assert access._caller_of_unlisted.cache_info().currsize == 1, "the caller's own key"


async def test_a_key_that_begins_like_a_token_is_still_a_key(api: Api) -> None:
    assert (await my_sessions(api, "eyJust a key")).status_code == 200


def test_the_secret_file_is_private_and_is_kept(tmp_path: Path) -> None:
    first = Tokens.open(tmp_path / "state")
    (file,) = (tmp_path / "state").iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert Tokens.open(tmp_path / "state").read(first.issue("t")).tenant == "t"
    file.write_bytes(b"short")
    with pytest.raises(ValueError, match="not a secret"):
        Tokens.open(tmp_path / "state")


@pytest.mark.parametrize("wanted", [True, False])
async def test_clients_use_tokens_only_if_the_operator_enables_them(serve: Serve, wanted: bool) -> None:
    async with serve(jwt_auth=wanted) as api:
        assert (await api.post("client/config", {})).json()["pjwt_auth_enabled"] is wanted


async def test_answers_about_a_key_do_not_reveal_it(api: Api) -> None:
    one, again, two = [
        (await api.http.get("/api/v1/auth/apikey/me", headers={"X-API-Key": key})).json()
        for key in ("tml-one", "tml-one", "tml-two")
    ]
    assert one == again
    assert isinstance(one["key_id"], int)
    assert 0 < one["key_id"] < 2**53
    assert one["key_id"] != two["key_id"]
    assert set(one) == {"key_id", "name", "note", "details"}
    assert "tml-" not in json.dumps(one)


async def test_deleting_a_key_is_refused_with_a_reason(api: Api) -> None:
    answer = await api.http.delete("/api/v1/auth/apikey/me")
    assert answer.status_code == 403
    assert "no list of keys" in answer.json()["detail"]
    assert (await my_sessions(api, "tml-one")).status_code == 200
