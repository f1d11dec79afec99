"""Signed links, which need no key: each is valid for one path and a limited time. The secret survives restarts."""

from __future__ import annotations

import os
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from starlette.requests import Request

from skyrl.api.signed_links import SignedUrls, stored_secret
from skyrl.base.wire.errors import RequestError

PATH = "/api/v1/downloads/files/s1:train:0/external_weights/a b+ä%2F/x.age"


def request_for(url: str) -> Request:
    """The request for a URL as a route gets it, with a decoded path."""
    parts = urlsplit(url)
    scope = {
        "type": "http",
        "scheme": parts.scheme,
        "server": (parts.hostname, parts.port or 80),
        "path": unquote(parts.path),
        "root_path": "",
        "query_string": parts.query.encode(),
        "headers": [(b"host", parts.netloc.encode())],
    }
    return Request(scope)


REQUEST = request_for("http://skyrl.local:8000/api/v1/sessions")


def test_a_link_is_valid_until_it_expires(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    urls = SignedUrls.open(tmp_path)
    link = urls.sign(REQUEST, PATH, 600)
    assert link.url.startswith("http://skyrl.local:8000/api/v1/downloads/")
    assert " " not in link.url
    urls.verify(request_for(link.url))
    monkeypatch.setattr("skyrl.api.signed_links.time.time", lambda: link.expires_at - 1)
    urls.verify(request_for(link.url))
    monkeypatch.setattr("skyrl.api.signed_links.time.time", lambda: link.expires_at)
    with pytest.raises(RequestError, match="expired") as refused:
        urls.verify(request_for(link.url))
    assert refused.value.status == 403


def test_a_changed_link_is_refused(tmp_path: Path) -> None:
    urls = SignedUrls.open(tmp_path)
    url = urls.sign(REQUEST, PATH, 600).url
    base, _, query = url.partition("?")
    changed = [
        url.replace("x.age", "y.age"),
        url.replace("expires=", "expires=9"),
        url.replace("signature=", "signature=0"),
        f"{base}?expires=99999999999",
        f"{base}?signature=&expires=",
        base,
        f"{base}/more?{query}",
        f"{base}?{query.replace('expires', 'Expires')}",
    ]
    for forged in changed:
        with pytest.raises(RequestError, match="not made by this server") as refused:
            urls.verify(request_for(forged))
        assert refused.value.status == 403


def test_the_secret_survives_a_restart_and_differs_between_servers(tmp_path: Path) -> None:
    url = SignedUrls.open(tmp_path / "one").sign(REQUEST, PATH, 600).url
    SignedUrls.open(tmp_path / "one").verify(request_for(url))
    (secret,) = (tmp_path / "one").iterdir()
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    with pytest.raises(RequestError):
        SignedUrls.open(tmp_path / "two").verify(request_for(url))
    secret.write_bytes(b"short")
    with pytest.raises(ValueError, match="not a secret"):
        SignedUrls.open(tmp_path / "one")


def test_a_link_begins_with_the_public_url(tmp_path: Path) -> None:
    urls = SignedUrls.open(tmp_path, "https://gpu.example/skyrl/")
    link = urls.sign(REQUEST, PATH, 600)
    assert link.url.startswith("https://gpu.example/skyrl/api/v1/downloads/")
    urls.verify(request_for(link.url.replace("https://gpu.example/skyrl", "http://127.0.0.1:8000")))


def test_processes_that_make_the_secret_at_once_get_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process finds no secret and makes one; the barrier lets all store theirs at the same time."""
    together = threading.Barrier(4)
    link = os.link
    monkeypatch.setattr(os, "link", lambda *paths: (together.wait(60), link(*paths)))
    with ThreadPoolExecutor(4) as pool:
        secrets = {made.result() for made in [pool.submit(stored_secret, tmp_path / "secret") for _ in range(4)]}
    assert secrets == {(tmp_path / "secret").read_bytes()}
    assert [file.name for file in tmp_path.iterdir()] == ["secret"]
