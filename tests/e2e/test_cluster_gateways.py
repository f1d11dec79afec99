"""One server that trains, and two gateways that use its vLLM, on one PostgreSQL. The gateways know neither the server's
address nor its state directory: the database names its router, and adapters come from the checkpoint store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from skyrl.storage.db.database import Database
from skyrl.storage.db.engine_state import read_state
from tests.servers import SLOW_START_S

from .mortal_server import STEP, Client, MortalServer, running, training_pass

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

KEY = "a-key-of-the-cluster"
SAMPLES = 24


@pytest.fixture(scope="module")
def trainer(database: Database, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MortalServer]:
    """The server that trains. It uses Ray, so that adapters travel."""
    directory = tmp_path_factory.mktemp("trainer")
    (directory / "skyrl.toml").write_text(
        f'inference_api_key = "{KEY}"\ninference_host = "127.0.0.2"\nray_address = "local"\n'
    )
    flags = ("--database-url", database.url, "--config", str(directory / "skyrl.toml"))
    server = MortalServer(directory / "state", *flags, "--checkpoint-store", (directory / "store").as_uri())
    with running(server):
        yield server


@pytest.fixture(scope="module")
def gateways(
    trainer: MortalServer, database: Database, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[MortalServer]]:
    """Two gateways with two API processes each."""
    directory = tmp_path_factory.mktemp("gateways")
    (directory / "skyrl.toml").write_text(f'inference_api_key = "{KEY}"\napi_processes = 2\n')
    flags = ("--backend", "none", "--base-model", "tiny", "--config", str(directory / "skyrl.toml"))
    store = str((trainer.state_dir.parent / "store").as_uri())
    made = [
        MortalServer(directory / name, *flags, "--database-url", database.url, "--checkpoint-store", store)
        for name in ("first", "second")
    ]
    with running(*made):
        yield made


def sampler_of(client: Client, path: str, number: int) -> str:
    wanted = {"session_id": client.session, "sampling_session_seq_id": number, "model_path": path}
    return client.ok("create_sampling_session", wanted)["sampling_session_id"]


def tokens(client: Client, sampler: str, seq_id: int) -> list[list[int]]:
    """A greedy sample's tokens."""
    return [sequence["tokens"] for sequence in client.outcome(send(client, sampler, seq_id))["sequences"]]


def send(client: Client, sampler: str, seq_id: int, max_tokens: int = 12, temperature: float = 0.0) -> str:
    body = client.sample_body(sampler, seq_id) | {
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]},
        "sampling_params": {"max_tokens": max_tokens, "temperature": temperature, "stop": []},
    }
    return client.ok("asample", body)["request_id"]


def unload(database: Database, name: str) -> None:
    """Unload an adapter from all vLLMs."""
    url = database.read(read_state).inference_proxy_url
    headers = {"Authorization": f"Bearer {KEY}"}
    answer = httpx.post(f"{url}/v1/unload_lora_adapter", json={"lora_name": name}, headers=headers, trust_env=False)
    assert answer.status_code == 200, answer.text


def kill(server: MortalServer) -> None:
    """SIGKILL to all processes of a server at once, as when its machine dies."""
    root = psutil.Process(server.pid)
    for process in (root, *root.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            process.kill()


def test_gateways_sample_from_the_trainers_vllm_and_one_ends_the_samples_of_a_killed_one(
    trainer: MortalServer, gateways: list[MortalServer], database: Database
) -> None:
    owner = Client(trainer.url)
    others = [Client(server.url, session=owner.session) for server in gateways]
    try:
        model = owner.model(0)
        commands = [("forward_backward", training_pass(1)), ("optim_step", STEP)]
        commands.append(("save_weights_for_sampler", {"path": "first"}))
        saved: dict[str, Any] = {}
        for seq_id, (path, body) in enumerate(commands, 1):
            saved = owner.outcome(owner.ok(path, {"model_id": model, "seq_id": seq_id} | body)["request_id"])
        wanted = tokens(owner, sampler_of(owner, saved["path"], 1), 0)
        assert len(wanted[0]) == 12
        state = database.read(read_state)
        assert str(state.inference_proxy_url).startswith("http://127.0.0.2:")
        assert state.state_dir is None

        for number, client in enumerate(others):
            unload(database, f"{model}@1")
            again = tokens(client, sampler_of(client, saved["path"], 10 + number), 0)
            assert again == wanted, "the gateway has vLLM load the adapter from the store"
        assert not (trainer.state_dir / "adapters").exists()
        assert not any((server.state_dir / "adapters").exists() for server in gateways)

        first, second = others
        sampler = sampler_of(first, saved["path"], 20)
        ids = [send(first, sampler, number, 800, 1.0) for number in range(SAMPLES)]
        kill(gateways[0])
        ends = [second.outcome(request_id) for request_id in ids]
        assert [len(end.get("sequences", ())) for end in ends] == [1] * SAMPLES, ends
    finally:
        for client in (owner, *others):
            client.close()


def test_the_samples_of_a_gateway_with_another_key_fail(
    trainer: MortalServer, database: Database, tmp_path: Path
) -> None:
    (tmp_path / "skyrl.toml").write_text('inference_api_key = "another key than that"\n')
    flags = ("--backend", "none", "--base-model", "tiny", "--config", str(tmp_path / "skyrl.toml"))
    server = MortalServer(tmp_path / "state", *flags, "--database-url", database.url)
    server.start()
    try:
        server.wait_api(SLOW_START_S)
        with closing(Client(server.url)) as client:
            failed = client.outcome(send(client, client.sampler(), 0))
            assert failed["category"] == "server"
    finally:
        server.stop()
