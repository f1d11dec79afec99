"""Identities, and what the SDK's command line does with them: the unmodified SDK on the real server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import tinker
from click.testing import CliRunner, Result
from tinker import types
from tinker.cli.__main__ import main_cli
from tinker.cli.exceptions import TinkerCliError
from tinker.lib._jwt_auth import JwtAuthProvider

from skyrl.cli.demo.server import DemoServer

from .conftest import ClientFactory
from .fault_proxy import FaultProxy, edited

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore::tinker.lib.experimental.ExperimentalWarning")]

SHORT = types.SamplingParams(max_tokens=5, stop=[])


def session_of(client: tinker.ServiceClient) -> str:
    return client.holder.get_session_id()


# Identity


@pytest.fixture
def with_tokens(server: DemoServer) -> Iterator[FaultProxy]:
    """A proxy for a server whose clients exchange their key for tokens."""
    with FaultProxy(server.url) as proxy:
        proxy.always("/client/config", edited(lambda config: config | {"pjwt_auth_enabled": True}))
        yield proxy


def test_a_client_identifies_itself_and_works_with_tokens(server: DemoServer, with_tokens: FaultProxy) -> None:
    by_key = tinker.RestClient(base_url=server.url, api_key="tml-me")
    me = tinker.RestClient(base_url=with_tokens.url, api_key="tml-me").whoami().result()
    with tinker.ServiceClient(base_url=with_tokens.url, api_key="tml-me") as client:
        assert me.user_urn.startswith("tml:user:")
        assert me.org_urn.startswith("tml:organization:")
        assert me.email is None
        sampler = client.create_sampling_client(base_model="tiny").result()
        answer = sampler.sample(types.ModelInput.from_ints([5]), num_samples=1, sampling_params=SHORT).result()
        assert len(answer.sequences[0].tokens) == 5
        session = session_of(client)
        assert session in by_key.list_sessions().result().sessions, "the token stands for the key's tenant"
    sent = {call.headers["X-API-Key"][:3] for call in with_tokens.seen("/asample")}
    assert sent == {"eyJ"}
    assert len(with_tokens.seen("/auth/token")) == 2, "one token request per client"


def test_a_refused_token_is_replaced_once(with_tokens: FaultProxy) -> None:
    rest = tinker.RestClient(base_url=with_tokens.url, api_key="tml-nobody")
    rest.whoami().result()
    provider = rest.holder._default_auth
    assert isinstance(provider, JwtAuthProvider)
    head, _, signature = provider._token.rpartition(".")
    provider._token = f"{head}.{signature[::-1]}"
    assert rest.list_sessions().result().sessions == []
    assert [call.told for call in with_tokens.seen("/sessions")] == [401, 200]
    assert len(with_tokens.seen("/auth/token")) == 2


# The command line


@pytest.fixture
def cli(server: DemoServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CliRunner:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TINKER_BASE_URL", server.url)
    monkeypatch.delenv("TINKER_API_KEY", raising=False)
    return CliRunner()


def run(cli: CliRunner, *arguments: str, given: str | None = None) -> Result:
    result = cli.invoke(main_cli, list(arguments), input=given)
    assert result.exit_code == 0, (result.output, result.exception)
    return result


def test_the_command_line_logs_in_asks_and_logs_out(cli: CliRunner, tmp_path: Path) -> None:
    assert "Logged in as tenant" in run(cli, "auth", "login", given="tml-cli\n").output
    stored = json.loads((tmp_path / ".tinker" / "credentials.json").read_text())
    assert [record["key"] for record in stored["keys"].values()] == ["tml-cli"]
    assert "Tinker accessible: yes" in run(cli, "auth", "status").output
    now = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    start, end = ((now + timedelta(hours=hours)).isoformat() for hours in (-1, 1))
    usage = json.loads(run(cli, "--format", "json", "billing", "usage", start, end).output)
    assert usage == {"data": [], "sessions": {}, "cost_data_through": None}
    storage = json.loads(run(cli, "--format", "json", "billing", "checkpoint-storage").output)
    assert storage["data"] == []
    assert "still active" in run(cli, "auth", "logout").output, "the key is still active"
    assert json.loads((tmp_path / ".tinker" / "credentials.json").read_text())["keys"] == {}


def test_the_log_out_with_a_generated_key_says_that_the_key_stays(cli: CliRunner, tmp_path: Path) -> None:
    run(cli, "auth", "login", given="tml-cli\n")
    file = tmp_path / ".tinker" / "credentials.json"
    stored = json.loads(file.read_text())
    for record in stored["keys"].values():
        record["type"] = "generated"
    file.write_text(json.dumps(stored))
    result = cli.invoke(main_cli, ["auth", "logout"])
    assert isinstance(result.exception, TinkerCliError)
    assert "Could not delete the API key" in result.exception.message
    assert json.loads(file.read_text())["keys"] == {}, "the local copy of the key is deleted nevertheless"


def test_the_command_line_downloads_a_timeline(cli: CliRunner, connect: ClientFactory, tmp_path: Path) -> None:
    client = connect("tml-cli")
    client.create_lora_training_client(base_model="tiny", rank=4).result()
    target = tmp_path / "out.pftrace"
    run(cli, "auth", "login", given="tml-cli\n")
    run(cli, "session", "export-trace", session_of(client), "--output", str(target))
    assert json.loads(target.read_bytes())["traceEvents"]
