"""Every command on the pages for users and operators, run page by page on a real server.

HTTP and the SDK use the server that the end-to-end tests share. Commands on files and on the database use a copy of its
state directory, because pages also back up, change and upgrade it.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import pytest
import tinker

from skyrl.api.access import tenant_of_key
from skyrl.cli.demo.server import DemoServer
from skyrl.runtime.processes.ports import free_port
from skyrl.storage.db.database import Database
from skyrl.storage.db.maintenance import backup
from skyrl.storage.db.migrate import migrate
from tests.e2e import page_programs
from tests.e2e.conftest import cross_entropy, train, vllm_of
from tests.e2e.page_runner import PageFailed, Terminal, run_python
from tests.nginx import NEEDS_NGINX, PROXY_PAGE, certificate, running_nginx
from tests.pages import ROOT, RUN_PAGES, SHELL, Command, blocks_of, commands_in
from tests.postgres_server import ON_SQLITE, PostgresServer
from tests.servers import SLOW_START_S

pytestmark = [pytest.mark.vllm, ON_SQLITE]  # the pages show SQLite, and PostgreSQL where a page is about PostgreSQL

KEY = "tml-pages"
"""The key of the tenant for whom the pages' keys stand."""

CONFIG = 'state_dir = "{state}"\napi_keys = "managed"\nquota_tokens_per_minute = 50000\nquota_models = 4\n'
"""The `skyrl.toml` that pages about keys and quotas name."""

PASSWORD = "p@ss/w:rd"
POSTGRES_PAGES = ("docs/operating/postgresql.md", "docs/operating/backup.md")


@dataclass(frozen=True)
class TenantData:
    """A tenant's data on the shared server: one run with a checkpoint; and a copy of the state directory."""

    state: Path
    run: str
    session: str


@pytest.fixture(scope="module")
def work(server: DemoServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TenantData]:
    with tinker.ServiceClient(base_url=server.url, api_key=KEY) as service:
        trainer = service.create_lora_training_client(base_model="tiny", rank=8).result()
        train(trainer, [cross_entropy(list(range(5, 20)))], steps=1, learning_rate=1e-3)
        trainer.save_state("step-000001").result()
        trainer.save_weights_for_sampler("final").result()
        state = tmp_path_factory.mktemp("pages") / "state"
        copy_state(server.state_dir, state)
        run = trainer.get_info().model_id
        yield TenantData(state, run, run.partition(":")[0])


def copy_state(running: Path, to: Path) -> None:
    """Copy the directory as the page on backups describes. The copy is repeated if the server deletes a file
    meanwhile."""
    while True:
        to.mkdir(mode=0o700)
        with closing(Database(f"sqlite:///{running / 'skyrl.db'}")) as database:
            backup(database, to / "skyrl.db")
        try:
            for name in ("checkpoints", "adapters", "snapshots", "logs"):
                (running / name).mkdir(exist_ok=True)
                shutil.copytree(running / name, to / name)
        except (shutil.Error, FileNotFoundError):
            shutil.rmtree(to)
        else:
            break
    for name in ("token-secret", "url-secret"):
        shutil.copy2(running / name, to / name)


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with page_programs.running(tmp_path_factory.mktemp("programs")) as address:
        yield address


@pytest.fixture
def terminal(server: DemoServer, work: TenantData, programs: Path, tmp_path: Path) -> Terminal:
    """A terminal on this machine in which the paths, ids and addresses of the pages lead to those of the test."""
    state, etc = tmp_path / "state", tmp_path / "etc"
    shutil.copytree(work.state, state)
    etc.mkdir()
    address = server.url.removeprefix("http://")
    names = {
        "127.0.0.1:8000": address,
        "~/.local/share/skyrl": str(state),
        "/var/lib/skyrl": str(state),
        "/srv/skyrl": str(state),
        "/etc/skyrl": str(etc),
        "/opt/skyrl": str(ROOT),
        "/backup": str(tmp_path / "backup"),
        "/tmp/restored": str(tmp_path / "restored"),
        ".venv/bin/activate": "/dev/null",
        "tml-me": KEY,
        "3a1f0b6c9d2e4f508172635445362718": tenant_of_key(KEY),
        "s01a2037e77366a36b41954c52f86fb1845c4:train:0": work.run,
        "s01a2037e77366a36b41954c52f86fb1845c4": work.session,
    }
    variables = {"SKYRL_STATE_DIR": str(state), "TINKER_BASE_URL": server.url, "TINKER_API_KEY": KEY}
    typed = {"getpass": f"{PASSWORD}\n", "--adopt": f"{KEY}\n"}
    made = Terminal(tmp_path / "home", programs, variables, names, typed)
    for file in (etc / "skyrl.toml", made.work / "skyrl.toml"):
        file.write_text(CONFIG.format(state=state))
    return made


@pytest.fixture
def postgresql(terminal: Terminal, postgres: PostgresServer) -> Iterator[str]:
    """PostgreSQL and its programs at the address that the pages show; returns the name of this test's role, which the
    pages call `skyrl`."""
    role = f"pages_{secrets.token_hex(4)}"
    terminal.names |= {
        "127.0.0.1:5432/skyrl": f"127.0.0.1:{postgres.port}/{role}",
        "postgresql://skyrl:": f"postgresql://{role}:",
        "}/restored": f"}}/{role}_restored",
        "ROLE skyrl": f"ROLE {role}",
        "DATABASE skyrl OWNER skyrl": f"DATABASE {role} OWNER {role}",
    }
    terminal.add_programs(postgres.programs)
    yield role
    for database in (role, f"{role}_restored"):
        postgres.execute(f"DROP DATABASE IF EXISTS {database} WITH (FORCE)")
    postgres.execute(f"DROP ROLE IF EXISTS {role}")


def run_page(page: str, terminal: Terminal, execute: Callable[[str], None] | None = None) -> None:
    """Run every unmarked block; `execute` runs SQL. The python blocks run last, in one process."""
    blocks = [block for block in blocks_of(page) if block.not_run is None]
    for block in blocks:
        if block.language in SHELL:
            for command in commands_in(block):
                terminal.run(command)
        elif block.language == "sql":
            assert execute is not None, f"{block}: this page has no PostgreSQL"
            for statement in terminal.real(block.text).strip().split("\n"):
                execute(statement)
    if scripts := [block.text for block in blocks if block.language == "python"]:
        run_python(scripts, terminal)


@pytest.mark.parametrize("page", [page for page in RUN_PAGES if page not in POSTGRES_PAGES])
def test_all_commands_of_a_page_run(page: str, terminal: Terminal) -> None:
    run_page(page, terminal)


@pytest.mark.slow
def test_the_page_moves_a_server_to_postgresql(terminal: Terminal, postgresql: str, postgres: PostgresServer) -> None:
    run_page("docs/operating/postgresql.md", terminal, postgres.execute)


def test_the_page_makes_and_restores_backups(terminal: Terminal, postgresql: str, postgres: PostgresServer) -> None:
    postgres.execute(f"CREATE ROLE {postgresql} LOGIN PASSWORD '{PASSWORD}'")
    for database in (postgresql, f"{postgresql}_restored"):
        postgres.execute(f"CREATE DATABASE {database} OWNER {postgresql}")
    own = f"postgresql://{postgresql}:{quote(PASSWORD, safe='')}@127.0.0.1:{postgres.port}/{postgresql}"
    with closing(Database(own)) as database:
        migrate(database)
    run_page("docs/operating/backup.md", terminal)


@pytest.mark.slow
@NEEDS_NGINX
def test_the_sdk_works_through_nginx_as_the_page_configures_it(
    server: DemoServer, terminal: Terminal, tmp_path: Path
) -> None:
    """Both of the page's blocks are in one nginx, with TLS: a server at the root of its name, and under a path."""
    port = free_port()
    at_root, under_path = (block.text for block in blocks_of(PROXY_PAGE) if block.language == "nginx")
    *_, public_url = (block.text for block in blocks_of(PROXY_PAGE) if block.language == "toml")
    config = tmp_path / "skyrl.toml"
    config.write_text(public_url.replace("gpu.example.org", f"localhost:{port}"))
    vllm_url, vllm_key = vllm_of(server)
    external = ("--external-inference-url", vllm_url, "--external-inference-api-key", vllm_key)
    proxied = DemoServer(tmp_path / "proxied", *external, "--config", str(config))
    servers = f"{at_root.rstrip().removesuffix('}')}\n{under_path}\n}}".replace("443", f"127.0.0.1:{port}")
    proxied.start()
    try:
        with running_nginx(tmp_path, servers.replace("127.0.0.1:8000", f"127.0.0.1:{proxied.port}")):
            proxied.wait_ready(SLOW_START_S)
            ca = str(certificate(tmp_path))
            terminal.run(Command(f"export SSL_CERT_FILE={ca} CURL_CA_BUNDLE={ca}"))
            terminal.names |= {"gpu.example.org": f"localhost:{port}", "tml-...": KEY}
            run_python([THROUGH_PROXY], terminal)
            terminal.names["tinker://.../weights/final"] = (terminal.work / "path").read_text()
            [test] = [block for block in blocks_of(PROXY_PAGE) if block.language == "console"]
            for command in commands_in(test):
                terminal.run(command)
            assert list(terminal.work.glob("**/adapter_model.safetensors")), "the link leads through the proxy"
    finally:
        proxied.stop()


THROUGH_PROXY = """
import httpx, tinker
from pathlib import Path
from tinker import types

MIB = 1 << 20
prompt = types.ModelInput.from_ints([5, 6, 7])
for url in ("https://gpu.example.org", "https://gpu.example.org/skyrl"):
    with tinker.ServiceClient(base_url=url, api_key="tml-...") as service:
        trainer = service.create_lora_training_client(base_model="tiny", rank=8).result()
        inputs = {"target_tokens": [6, 7, 8], "weights": [1.0, 1.0, 1.0]}
        trainer.forward_backward([types.Datum(model_input=prompt, loss_fn_inputs=inputs)], "cross_entropy").result()
        trainer.optim_step(types.AdamParams(learning_rate=1e-3)).result()
        sampler = trainer.save_weights_and_get_sampling_client()
        wanted = types.SamplingParams(max_tokens=4)
        assert sampler.sample(prompt, num_samples=2, sampling_params=wanted).result().sequences
        Path("path").write_text(trainer.save_state("final").result().path)
    large = httpx.post(f"{url}/api/v1/create_session", headers={"X-API-Key": "tml-..."}, json={"tags": "x" * 8 * MIB})
    assert large.json()["detail"].startswith("the body has"), large.text  # nginx lets it through; skyrl refuses it
"""


def test_a_wrong_page_fails(terminal: Terminal) -> None:
    with pytest.raises(PageFailed, match="ended with 2"):
        terminal.run(Command("skyrl serve --prot 8000"))
    with pytest.raises(PageFailed, match="not there: the database is gone"):
        terminal.run(Command("skyrl db check", ("the database is gone",)))
    with pytest.raises(PageFailed, match="NameError"):
        run_python(["number = 1", "print(nmuber)"], terminal)
    terminal.run(Command("cd / && export WORD=kept"))
    terminal.run(Command('echo "$WORD $PWD"', ("kept /",)))
