"""The wheel that the tree builds, in an environment of its own: it serves from an empty folder, and goes on with
the state directory of the last version's server."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import tinker

from skyrl import __version__
from skyrl.cli.demo.server import DemoServer
from skyrl.storage.db.database import Database
from skyrl.storage.db.migrate import newest_revision, revision_of
from tests.postgres_server import ON_SQLITE
from tests.servers import ready

from .old_state import KEY, Answers, go_on, sample, unpack

pytestmark = ON_SQLITE

ROOT = Path(__file__).parents[2]
UV = Path(sys.executable).parent / "uv"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("wheel")
    subprocess.run([UV, "build", "--quiet", "--wheel", "--out-dir", directory, ROOT], check=True)
    (built,) = directory.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment that has the wheel, and the other packages of this environment."""
    home = tmp_path_factory.mktemp("installed") / "venv"
    subprocess.run([UV, "venv", "--quiet", "--python", sys.executable, home], check=True)
    python = home / "bin" / "python"
    (packages,) = home.glob("lib/python*/site-packages")
    # A path in a .pth file: Python does not read the .pth files there, so this checkout is not importable.
    (packages / "others.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    subprocess.run([UV, "pip", "install", "--quiet", "--python", python, "--no-deps", wheel], check=True)
    return home / "bin"


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH" and not name.startswith("SKYRL_")}


def test_the_wheel_has_every_file_of_the_package_and_the_migrations(wheel: Path) -> None:
    kept = {
        path.relative_to(ROOT)
        for folder in ("skyrl", "alembic")
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    migrations = {str(Path("skyrl/storage/db") / path) for path in kept if path.parts[0] == "alembic"}
    assert len(migrations) >= 4  # env.py, its template, and the revisions since 0.2
    lacking = {str(path) for path in kept if path.parts[0] == "skyrl"} | migrations
    assert lacking - {*zipfile.ZipFile(wheel).namelist()} == set()


def test_the_wheel_is_imported_from_its_environment_and_makes_a_database(
    installed: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    here, state = tmp_path / "empty", tmp_path / "state"
    here.mkdir()

    def run(*command: str | Path) -> str:
        return subprocess.run(command, cwd=here, env=environment, capture_output=True, text=True, check=True).stdout

    assert run(installed / "python", "-c", "import skyrl; print(skyrl.__file__)").startswith(str(installed.parent))
    assert run(installed / "skyrl", "version") == f"{__version__}\n"
    run(installed / "skyrl", "keys", "create", "--make-database", "--name", "first", "--state-dir", state)
    with closing(Database(f"sqlite:///{state / 'skyrl.db'}")) as database:
        assert revision_of(database) == newest_revision()


@dataclass(frozen=True)
class Served:
    """The installed server on the state directory of the last version, and what that version's server answered."""

    server: DemoServer
    before: Answers


@pytest.fixture(scope="module")
def served(installed: Path, environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    state = tmp_path_factory.mktemp("old") / "state"
    before = unpack(state)
    here = tmp_path_factory.mktemp("empty")
    with ready(DemoServer(state, skyrl=[str(installed / "skyrl")], cwd=here, environment=environment)) as running:
        yield Served(running, before)
    assert [*here.iterdir()] == [], "the server writes into its state directory only"


@pytest.mark.slow
@pytest.mark.vllm
def test_the_wheel_serves_from_an_empty_folder(served: Served, installed: Path) -> None:
    assert served.server.status()["version"] == __version__
    page = httpx.get(served.server.url, headers={"accept": "text/html"}, follow_redirects=True)
    assert page.headers["content-type"].startswith("text/html")
    assert Path(f"/proc/{served.server.pid}/cwd").readlink().name.startswith("empty")
    command = Path(f"/proc/{served.server.pid}/cmdline").read_bytes().split(b"\0")
    assert str(installed / "skyrl").encode() in command


@pytest.mark.slow
@pytest.mark.vllm
def test_a_checkpoint_of_the_last_version_gives_the_same_samples(served: Served) -> None:
    with tinker.ServiceClient(base_url=served.server.url, api_key=KEY) as client:
        tokens, logprobs = sample(client, served.before.sampler)
    assert tokens == served.before.tokens
    assert logprobs == pytest.approx(served.before.logprobs, abs=1e-4)


@pytest.mark.slow
@pytest.mark.vllm
def test_a_run_of_the_last_version_goes_on_with_its_optimizer(served: Served) -> None:
    runs = tinker.RestClient(base_url=served.server.url, api_key=KEY).list_training_runs().result().training_runs
    assert served.before.run in [run.training_run_id for run in runs]
    with tinker.ServiceClient(base_url=served.server.url, api_key=KEY) as client:
        losses = go_on(client, served.before.state)
    assert losses == pytest.approx(served.before.losses, rel=1e-4)
    assert losses[1] < losses[0]
