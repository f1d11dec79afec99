"""Sessions, projects, usage, the audit log, timelines and identities: the unmodified SDK and its command line."""

from __future__ import annotations

import json
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

import pytest
import tinker
from click.testing import CliRunner, Result
from tinker import types
from tinker.cli.__main__ import main_cli
from tinker.cli.exceptions import TinkerCliError
from tinker.lib._jwt_auth import JwtAuthProvider
from tinker.types import BillingUsageResponse, SessionSearchRequest, UserSearchOwner
from transformers import PreTrainedTokenizerBase

from skyrl.cli.demo.server import DemoServer

from .conftest import ClientFactory, cross_entropy, train
from .fault_proxy import FaultProxy, edited

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore::tinker.lib.experimental.ExperimentalWarning")]

SHORT = types.SamplingParams(max_tokens=5, stop=[])


def session_of(client: tinker.ServiceClient) -> str:
    return client.holder.get_session_id()


def this_hour(offset: int = 0) -> datetime:
    return datetime.now(UTC).replace(minute=0, second=0, microsecond=0) + timedelta(hours=offset)


def usage_of(admin: tinker.AdminClient, session: str) -> Counter[str]:
    """The amounts of a session by type; cached prefill is counted separately."""
    said: BillingUsageResponse = admin.get_billing_usage(this_hour(-1), this_hour(1)).result()
    sums: Counter[str] = Counter()
    for event in said.data:
        assert event.estimated_cost_usd is None
        if event.session_id != session:
            continue
        info = event.event_info
        if isinstance(info, types.CheckpointBillingEvent):
            sums[info.type] += info.count
        elif isinstance(info, types.SamplingPrefillBillingEvent):
            sums["cached" if info.cached else "prefill"] += info.token_count
        elif not isinstance(info, types.StorageBillingEvent):
            sums[info.type] += info.token_count
    return sums


def test_usage_counts_the_tokens_sent_and_received(
    server: DemoServer, connect: ClientFactory, tokenizer: PreTrainedTokenizerBase
) -> None:
    client = connect("tml-usage")
    tokens = tokenizer.encode("The old fox watches the river at dawn.")
    trainer = client.create_lora_training_client(base_model="tiny", rank=4).result()
    train(trainer, [cross_entropy(tokens), cross_entropy(tokens[:5])], 3, 1e-3)
    trainer.forward([cross_entropy(tokens)], "cross_entropy").result()
    trainer.save_state("kept").result()
    sampler = trainer.save_weights_and_get_sampling_client().result()
    prompts = [tokens[:7], tokens[:3], tokens * 5, tokens * 5]
    received = 0
    cached = 0
    for prompt in prompts:
        answer = sampler.sample(types.ModelInput.from_ints(prompt), num_samples=2, sampling_params=SHORT).result()
        received += sum(len(sequence.tokens) for sequence in answer.sequences)
        cached += answer.prompt_cache_hit_tokens or 0
    expected = {
        "training": 3 * (len(tokens) - 1 + 4) + len(tokens) - 1,
        "checkpoint": 1,
        "prefill": sum(len(prompt) for prompt in prompts) - cached,
        "sampling_sample": received,
    } | ({"cached": cached} if cached else {})
    admin = tinker.AdminClient(base_url=server.url, api_key="tml-usage")
    deadline = time.monotonic() + 60
    while usage_of(admin, session_of(client)) != expected:
        assert time.monotonic() < deadline, (usage_of(admin, session_of(client)), expected)
        time.sleep(0.2)
    stored = admin.get_current_checkpoint_storage_usage().result()
    (item,) = stored.data
    saved = tinker.RestClient(base_url=server.url, api_key="tml-usage").list_user_checkpoints().result().checkpoints
    assert item.checkpoint_count == len(saved) == 1
    assert item.size_bytes == saved[0].size_bytes
    assert item.estimated_monthly_cost_usd is None


def test_sessions_are_found_by_search_and_moved_between_projects(server: DemoServer) -> None:
    def make(name: str, **more: object) -> tinker.ServiceClient:
        return tinker.ServiceClient(base_url=server.url, api_key="tml-search", display_name=name, **more)  # type: ignore[arg-type]

    with make("nightly one", user_metadata={"lr": "0.1"}) as one, make("nightly two", project_id="blue") as two:
        rest = tinker.RestClient(base_url=server.url, api_key="tml-search")
        first, second = session_of(one), session_of(two)
        assert rest.get_session(first).result().display_name == "nightly one"
        assert rest.get_session(first, access_scope="accessible").result().user_metadata == {"lr": "0.1"}
        assert rest.list_sessions(access_scope="accessible").result().sessions == [second, first]
        page = rest.search_sessions(SessionSearchRequest(display_name="NIGHTLY", limit=1)).result()
        assert [found.session_id for found in page.sessions] == [second]
        assert page.sessions[0].project_id == "blue"
        assert page.sessions[0].status == types.SessionActive()
        rest_of = SessionSearchRequest(display_name="nightly", limit=1, cursor=page.next_cursor)
        page = rest.search_sessions(rest_of).result()
        assert [found.session_id for found in page.sessions] == [first]
        assert page.sessions[0].project_id == "default"
        assert page.next_cursor is None
        rest.assign_session_project(first, "blue").result()
        found = rest.search_sessions(SessionSearchRequest(project_ids=["blue"])).result().sessions
        assert [each.session_id for each in found] == [second, first]
        by_owner = SessionSearchRequest(owner=UserSearchOwner(owner_urns=[found[0].owner]))
        assert len(rest.search_sessions(by_owner).result().sessions) == 2
        two.create_lora_training_client(base_model="tiny", rank=4).result()
        assert len(rest.list_training_runs(project_id="blue", access_scope="accessible").result().training_runs) == 1
        assert rest.list_training_runs(project_id="red").result().training_runs == []
    ended = SessionSearchRequest(statuses=[types.ClientFinishedSessionStatusQuery(reasons=["success"])])
    assert len(rest.search_sessions(ended).result().sessions) == 2


def test_the_audit_log_records_the_life_of_a_checkpoint(server: DemoServer, connect: ClientFactory) -> None:
    client = connect("tml-audit")
    rest = tinker.RestClient(base_url=server.url, api_key="tml-audit")
    trainer = client.create_lora_training_client(base_model="tiny", rank=4).result()
    path = trainer.save_weights_for_sampler("kept").result().path
    client.create_sampling_client(model_path=path).result()
    rest.publish_checkpoint_from_tinker_path(path).result()
    rest.assign_session_project(session_of(client), "blue").result()
    rest.delete_checkpoint_from_tinker_path(path).result()
    admin = tinker.AdminClient(base_url=server.url, api_key="tml-audit")
    log = admin.get_audit_log().result().entries
    assert [entry.event for entry in log] == [
        "checkpoint_created",
        "checkpoint_sampled",
        "checkpoint_published",
        "project_session_assigned",
        "checkpoint_deleted",
    ]
    assert {entry.tinker_path for entry in log if entry.event.startswith("checkpoint")} == {path}
    assert len(admin.get_audit_log("checkpoints").result().entries) == 4
    assert admin.get_audit_log("projects").result().entries[0].event_details["project_id"] == "blue"
    assert admin.get_audit_log(day=date(2020, 1, 1)).result().entries == []


def test_the_timeline_of_a_session_opens_without_a_key(
    server: DemoServer, connect: ClientFactory, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    client = connect("tml-trace")
    trainer = client.create_lora_training_client(base_model="tiny", rank=4).result()
    train(trainer, [cross_entropy(tokenizer.encode("The old fox"))], 2, 1e-3)
    sampler = trainer.save_weights_and_get_sampling_client().result()
    sampler.sample(types.ModelInput.from_ints([5, 6]), num_samples=1, sampling_params=SHORT).result()
    rest = tinker.RestClient(base_url=server.url, api_key="tml-trace")
    url = rest.export_session_trace(session_of(client)).result()
    urllib.request.urlretrieve(url, tmp_path / "session.pftrace")
    events = json.loads((tmp_path / "session.pftrace").read_bytes())["traceEvents"]
    names = Counter(event["name"] for event in events if event["ph"] == "b")
    assert names == {
        "create_model": 1,
        "forward_backward": 2,
        "optim_step": 2,
        "save_weights_for_sampler": 1,
        "external": 1,
    }
    began = {event["id"]: event["ts"] for event in events if event["ph"] == "b"}
    ended = {event["id"]: event["ts"] for event in events if event["ph"] == "e"}
    assert began.keys() == ended.keys()
    assert all(began[request] <= ended[request] for request in began)


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
    start, end = this_hour(-1).isoformat(), this_hour(1).isoformat()
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
