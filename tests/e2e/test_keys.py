"""Managed keys with the unmodified SDK and tokens: which errors the SDK raises for an unknown key, a missing scope, or
a revoked key.

The server is a gateway without a model and without vLLM; every process is the real one.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import tinker

from skyrl.cli.demo.server import DemoServer
from tests.databases import url_of

from .mortal_server import WAIT_S

UPSTREAM = "http://127.0.0.1:9"


def run(server: DemoServer, *arguments: str) -> str:
    here = ("--state-dir", str(server.state_dir), "--database-url", url_of(server.state_dir))
    command = [sys.executable, "-m", "skyrl.cli.main", "keys", *arguments, *here]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=WAIT_S).stdout.strip()


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DemoServer]:
    monkeypatch.setenv("SKYRL_JWT_AUTH", "true")
    flags = ("--backend", "none", "--base-model", "tiny", "--external-inference-url", UPSTREAM)
    running = DemoServer(tmp_path / "state", *flags, "--host", "0.0.0.0", "--api-keys", "managed")
    running.start()
    try:
        running.wait_api(WAIT_S)
        yield running
    finally:
        running.stop()


def until_taken(server: DemoServer, key: str) -> None:
    """Wait until the running server accepts a new key."""
    deadline = time.monotonic() + WAIT_S
    with httpx.Client(base_url=server.url, headers={"X-API-Key": key}) as http:
        while http.get("/api/v1/sessions").status_code == 401:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def until_refused(action: Callable[[], object]) -> Exception:
    """The SDK's error for a key, once the server knows that the key has ended."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        try:
            action()
        except tinker.APIStatusError as error:
            return error
    raise AssertionError("the key is still taken")


def test_the_sdk_raises_an_error_that_says_what_a_key_lacks(server: DemoServer) -> None:
    """The server listens on an address that other machines can reach, which managed keys permit."""
    key = run(server, "create", "--scope", "sample")

    until_taken(server, key)
    stranger = tinker.ServiceClient(base_url=server.url, api_key="tml-nobodys")
    with pytest.raises(tinker.AuthenticationError, match="unknown here"):
        stranger.create_sampling_client(base_model="tiny").result()
    with tinker.ServiceClient(base_url=server.url, api_key=key) as client:
        assert client.create_sampling_client(base_model="tiny").result().get_base_model()
        with pytest.raises(tinker.PermissionDeniedError, match="scope 'train'"):
            client.create_lora_training_client(base_model="tiny", rank=4).result()
    rest = tinker.RestClient(base_url=server.url, api_key=key)
    assert rest.list_sessions().result().sessions
    run(server, "revoke", key[4:16])
    error = until_refused(lambda: rest.list_sessions().result())
    assert isinstance(error, tinker.AuthenticationError), error
