"""The `tinker` command line, run in this process; one command runs as a separate program."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from click import Command
from click.testing import CliRunner
from tinker.cli.__main__ import main_cli
from tinker.cli.commands import checkpoint

from ..catalogue import BrokenSDK, feature
from ..user import MODEL, SECOND_NAME, User, run_program, wait

GROUP = "Command line"


@contextmanager
def credentials(user: User) -> Iterator[None]:
    """Set the environment variables that a command reads. They are removed afterwards, because older SDKs prefer them
    to a key given in the program."""
    given = {"TINKER_BASE_URL": user.url, "TINKER_API_KEY": user.key}
    os.environ.update(given)
    try:
        yield
    finally:
        for name in given:
            del os.environ[name]


def run_tinker(user: User, *arguments: str) -> Any:
    """The output of `tinker --format json ...`, parsed if it is JSON."""
    with credentials(user):
        result = CliRunner().invoke(main_cli, ["--format", "json", *arguments])
    if result.exception:
        raise result.exception
    text = result.stdout.strip()
    return json.loads(text) if text.startswith(("{", "[")) else text


@feature(GROUP, "`tinker run list` and `run info`.", needs=("tinker run list", "tinker run info"))
def tinker_run(user: User) -> None:
    run = user.model_id(user.train(rank=2))
    assert run in [found["training_run_id"] for found in run_tinker(user, "run", "list")["runs"]]
    assert run_tinker(user, "run", "info", run)["base_model"] == MODEL
    with credentials(user):
        table = CliRunner().invoke(main_cli, ["run", "info", run])
    assert MODEL in table.stdout


@feature(GROUP, "`tinker version`, and a command as a program of its own.", needs=("tinker version",))
def tinker_program(user: User) -> None:
    assert run_tinker(user, "version").startswith("tinker ")
    run = user.model_id(user.train())
    with credentials(user):
        result = run_program("-m", "tinker.cli", "--format", "json", "run", "list")
    assert run in [found["training_run_id"] for found in json.loads(result)["runs"]]


@feature(
    GROUP,
    "`tinker checkpoint list`, `info`, `publish`, `unpublish` and `set-ttl`.",
    needs=tuple(f"tinker checkpoint {name}" for name in ("list", "info", "publish", "unpublish", "set-ttl")),
)
def tinker_checkpoint(user: User) -> None:
    trainer = user.train()
    path = wait(trainer.save_state("c")).path

    def info() -> Any:
        return run_tinker(user, "checkpoint", "info", path)

    for arguments in (("--run-id", user.model_id(trainer)), ()):
        listed = run_tinker(user, "checkpoint", "list", *arguments)["checkpoints"]
        assert path in [found["tinker_path"] for found in listed]
    assert info()["public"] is False
    run_tinker(user, "checkpoint", "publish", path)
    assert info()["public"] is True
    run_tinker(user, "checkpoint", "unpublish", path)
    assert info()["public"] is False
    run_tinker(user, "checkpoint", "set-ttl", path, "--ttl", "7200")
    assert info()["expires_at"]
    run_tinker(user, "checkpoint", "set-ttl", path, "--remove")
    assert not info().get("expires_at")


@feature(GROUP, "`tinker checkpoint delete`, by path and by run.", needs=("tinker checkpoint delete",))
def tinker_checkpoint_delete(user: User) -> None:
    trainer = user.train()
    run = user.model_id(trainer)
    first, second = (wait(trainer.save_state(name)).path for name in ("a", "b"))
    if isinstance(vars(checkpoint).get("list"), Command):
        raise BrokenSDK("`delete` calls the command `list` where it means Python's")
    run_tinker(user, "checkpoint", "delete", first, "--yes")
    assert [found.tinker_path for found in wait(user.rest.list_checkpoints(run)).checkpoints] == [second]
    run_tinker(user, "checkpoint", "delete", "--run-id", run, "--yes")
    assert wait(user.rest.list_checkpoints(run)).checkpoints == []


@feature(GROUP, "`tinker checkpoint download`: a PEFT adapter.", needs=("tinker checkpoint download",))
def tinker_checkpoint_download(user: User) -> None:
    trainer = user.train(rank=3)
    user.step(trainer)
    path = wait(trainer.save_state("d")).path
    target = user.directory / "downloads"
    run_tinker(user, "checkpoint", "download", path, "--output", str(target))
    config = json.loads((target / path.removeprefix("tinker://").replace("/", "_") / "adapter_config.json").read_text())
    assert config["r"] == 3


@feature(GROUP, "`tinker model list`.", needs=("tinker model list",))
def tinker_model(user: User) -> None:
    listed = json.dumps(run_tinker(user, "model", "list"))
    assert MODEL in listed
    assert SECOND_NAME in listed


@feature(GROUP, "`tinker session export-trace`.", needs=("tinker session export-trace",))
def tinker_session(user: User) -> None:
    target = user.directory / "session.pftrace"
    run_tinker(user, "session", "export-trace", user.session_of(user.model), "--output", str(target))
    assert target.stat().st_size > 0


@feature(GROUP, "`tinker billing usage`.", needs=("tinker billing usage",))
def tinker_billing(user: User) -> None:
    user.step(user.train())
    hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    window = [(hour + timedelta(hours=h)).strftime("%Y-%m-%dT%H:%M:%SZ") for h in (-1, 1)]
    assert "training" in json.dumps(run_tinker(user, "billing", "usage", *window))


@feature(GROUP, "`tinker billing checkpoint-storage`.", needs=("tinker billing checkpoint-storage",))
def tinker_billing_storage(user: User) -> None:
    wait(user.train().save_state("billed"))
    assert run_tinker(user, "billing", "checkpoint-storage")


@feature(GROUP, "`tinker auth status` reaches the server.", needs=("tinker auth status",))
def tinker_auth_status(user: User) -> None:
    assert "Tinker accessible: yes" in run_tinker(user, "auth", "status")


@feature(
    GROUP, "`tinker auth login` with a pasted key, and `logout`.", needs=("tinker auth login", "tinker auth logout")
)
def tinker_auth_login(user: User) -> None:
    with credentials(user):
        result = CliRunner().invoke(main_cli, ["auth", "login"], input=f"{user.key}\n")
        assert "Logged in as" in result.output, result.output
        assert user.key in (Path.home() / ".tinker" / "credentials.json").read_text()
        assert "Removed credential" in CliRunner().invoke(main_cli, ["auth", "logout"]).output


@feature(GROUP, "`tinker auth whoami`, with an API key: as above.", needs=("tinker auth whoami",), refusal="JWT auth")
def tinker_auth_whoami(user: User) -> None:
    run_tinker(user, "auth", "whoami")
