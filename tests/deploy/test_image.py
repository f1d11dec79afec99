"""The Dockerfile: hadolint, what is copied, the image's settings, and its health check."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import tomllib
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from skyrl.runtime.processes.ports import free_port
from tests.deploy.conftest import GetStatus
from tests.deploy.files import DEPLOY, ReadServe, dockerfile, health_check, image_environment, of_image
from tests.pages import ROOT


def test_hadolint_finds_nothing() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([hadolint, "--no-color", DEPLOY / "Dockerfile"], capture_output=True, text=True)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def copied() -> list[str]:
    """The paths of the repository that the image's stages copy."""
    lines = [text.split() for name, text in dockerfile() if name == "COPY" and not text.startswith("--from")]
    return [source for words in lines for source in words[:-1]]


def test_what_the_image_copies_exists_and_is_not_ignored() -> None:
    allowed = re.findall(r"^!(.+)$", (DEPLOY / "Dockerfile.dockerignore").read_text(), re.M)
    assert {"skyrl", "pyproject.toml"} <= {*copied()}
    assert [source for source in copied() if not (ROOT / source).exists()] == []
    assert {source.partition("/")[0] for source in copied()} == {*allowed}


def test_the_wheel_is_built_from_what_the_image_copies() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    named = [project["project"]["readme"], *project["project"]["license-files"], *wheel["packages"]]
    assert {*named, *wheel["force-include"]} <= {*copied()}


@pytest.mark.parametrize("hardware", ["cpu", "gpu"])
def test_each_dependency_of_the_image_is_pinned(hardware: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras[hardware], *extras["postgres"]]
    if hardware == "gpu":  # the image of a Ray cluster's nodes
        wanted += extras["ray"]
    pinned = re.findall(r"^([a-z0-9-]+)(?:\[\w+\])?==", (ROOT / f"requirements/{hardware}.txt").read_text(), re.M)
    names = {re.match(r"[\w-]+", requirement)[0] for requirement in wanted}  # type: ignore[index]
    assert names - {*pinned} == set()
    exact = {requirement for requirement in wanted if "==" in requirement}
    lines = (ROOT / f"requirements/{hardware}.txt").read_text()
    assert exact
    assert [requirement for requirement in exact if requirement not in lines] == []


def test_the_image_serves_other_machines_with_managed_keys_alone(read_serve: ReadServe) -> None:
    words = of_image("CMD").strip("[]").replace('"', "").split(", ")
    config = read_serve(words, image_environment())
    assert (config.host, config.api_keys, config.allow_remote) == ("0.0.0.0", "managed", False)
    assert str(config.port) == of_image("EXPOSE")
    assert str(config.state_dir) in of_image("VOLUME")


def test_the_image_runs_as_a_user_without_rights() -> None:
    assert of_image("USER") == "10001:10001"
    made = " ".join(text for name, text in dockerfile() if name == "RUN")
    assert "groupadd --gid 10001 skyrl" in made
    assert "useradd --uid 10001 --gid skyrl" in made


@pytest.mark.parametrize(("status", "code"), [(200, 0), (503, 1)])
def test_the_health_check_asks_the_server(status: int, code: int) -> None:
    paths: list[str] = []

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            paths.append(self.path)
            self.send_response(status)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        serving = threading.Thread(target=server.handle_request)
        serving.start()
        assert run_health_check(server.server_port) == code
        serving.join()
    assert paths == ["/api/v1/healthz"]


def test_the_health_check_fails_without_a_server() -> None:
    assert run_health_check(free_port()) == 1


def run_health_check(port: int) -> int:
    program, *arguments = health_check()
    assert program == "python"
    variables = os.environ | {"SKYRL_PORT": str(port), "http_proxy": "http://127.0.0.1:9"}
    return subprocess.run([sys.executable, *arguments], env=variables, capture_output=True).returncode


async def test_the_path_of_the_health_check_exists(status_of: GetStatus) -> None:
    [path] = re.findall(r"'GET', '([^']+)'", " ".join(health_check()))
    assert await status_of(path) == 200
    assert await status_of("/api/v1/health") == 404
