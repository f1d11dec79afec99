"""The cookbook's environment and workspace, made once, and the runs that the recipes' tests share."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator

import pytest
import tinker

from skyrl.base.tiny import model_path
from skyrl.cli.demo.server import DemoServer
from tests.environments import ROOT, environment
from tests.second_model import make_second
from tests.servers import ready, wait_all

from ..conftest import ALIAS, SECOND_ALIAS
from .workspace import KEY, Run, Workspace, serve_several


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DemoServer]:
    """A server with two base models: the tiny one under two names, and SECOND_ALIAS, which is only sampled from."""
    directory = tmp_path_factory.mktemp("cookbook-server")
    second = make_second(directory / "second")
    entries = [
        {"base_model": "tiny", "served_model_names": ["tiny", ALIAS]},
        {"base_model": str(second), "served_model_names": [SECOND_ALIAS], "uses": ["sample"]},
    ]
    with ready(DemoServer(directory / "server", "--base-models", json.dumps(entries))) as running:
        wait_all(running)
        yield running


@pytest.fixture(scope="package")
def workspace(server: DemoServer, tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    python = environment(ROOT / "requirements" / "cookbook.txt")
    return Workspace(tmp_path_factory.mktemp("cookbook"), python, server.url, model_path())


@pytest.fixture(scope="package")
def tools(server: DemoServer, tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """A workspace for recipes with tools of their own, with the lessons of each."""
    python = environment(ROOT / "requirements" / "cookbook-tools.txt")
    root = tmp_path_factory.mktemp("tools")
    path = os.pathsep.join([str(ROOT), str(ROOT / "examples" / "cookbook")])
    made = Workspace(root, python, server.url, model_path(), variables={"HOME": str(root), "PYTHONPATH": path})
    made.program("tests.e2e.cookbook.lessons", ALIAS)
    return made


@pytest.fixture(scope="package")
def two_models(server: DemoServer, tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """A workspace for recipes that train one model and sample from another one, SECOND_ALIAS."""
    python = environment(ROOT / "requirements" / "cookbook.txt")
    names, root = (ALIAS, SECOND_ALIAS), tmp_path_factory.mktemp("two-models")
    return Workspace(root, python, server.url, model_path(), names, serve_several(*names))


@pytest.fixture(scope="package")
def rolling(workspace: Workspace) -> Run:
    """Four steps of supervised training with periodic (at 2), rolling (at 1 and 3) and final checkpoints."""
    cadence = ("save_every=2", "rolling_save_every=1", "rolling_ttl_seconds=3600", "max_steps=4")
    return workspace.run("chat_sl.train", "rolling", *CHATS, *cadence)


@pytest.fixture
def stored(server: DemoServer) -> Stored:
    return Stored(server)


class Stored:
    """The checkpoints that the server lists."""

    def __init__(self, server: DemoServer) -> None:
        self._client = tinker.RestClient(base_url=server.url, api_key=KEY)

    def paths(self, run: Run) -> set[str]:
        """The checkpoints of the run's last model."""
        return {checkpoint.tinker_path for checkpoint in self.of(run.training_run)}

    def of(self, training_run: str) -> list[tinker.Checkpoint]:
        return self._client.list_checkpoints(training_run).result().checkpoints

    def everything(self) -> list[tinker.Checkpoint]:
        """All checkpoints of the recipes' key."""
        return self._client.list_user_checkpoints(limit=1000).result().checkpoints


CHATS = ("dataset=chats.jsonl", "batch_size=4", "max_length=256", "learning_rate=1e-2")


def assert_final_is_kept(run: Run, stored: Stored) -> None:
    """The run's last row is its final checkpoint. The server keeps its state and its sampler weights without expiry."""
    final = run.checkpoints[-1]
    assert final["name"] == "final"
    kept = {checkpoint.tinker_path: checkpoint.expires_at for checkpoint in stored.of(run.training_run)}
    assert kept[final["state_path"]] is None
    assert kept[final["sampler_path"]] is None
