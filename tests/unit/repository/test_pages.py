"""Checks of the pages' blocks that need no server: each block has a known language, and each option and configuration
key exists, also in blocks that no test runs.
"""

from __future__ import annotations

import functools
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer

from skyrl.base.config.loading import load_config
from skyrl.cli.main import app
from skyrl.storage.db.migrate import newest_revision
from tests.nginx import NEEDS_NGINX, write_configuration
from tests.pages import OUTPUT, PROGRAMS, RUN_PAGES, SETTINGS, SHELL, Block, blocks_of, commands_in

BLOCKS = [block for page in RUN_PAGES for block in blocks_of(page)]


def of_language(*languages: str) -> list[Block]:
    return [block for block in BLOCKS if block.language in languages]


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_every_block_has_a_known_language(block: Block) -> None:
    assert block.language in (*PROGRAMS, *SETTINGS, *OUTPUT)
    assert block.not_run is None or block.language in PROGRAMS, "only blocks of programs may be marked as not run"


def skyrl_commands(line: str) -> list[list[str]]:
    """For each `skyrl` command in a line of shell, the words after `skyrl`."""
    words = shlex.split(line.replace(";", " ; "), comments=True)
    starts = [i for i, word in enumerate(words) if word.rpartition("/")[2] == "skyrl" and words[i - 1 : i] != ["-u"]]
    starts = [i for i in starts if words[i + 1 : i + 2] and words[i + 1] in _commands(_root())]
    ends = [next((j for j in range(i, len(words)) if words[j] in (";", "|", "&&", ">")), len(words)) for i in starts]
    return [words[i + 1 : end] for i, end in zip(starts, ends, strict=True)]


@functools.cache
def _root() -> Any:
    return typer.main.get_command(app)


def _commands(group: Any) -> dict[str, Any]:
    """The subcommands of a command group; empty for a command that is no group."""
    return getattr(group, "commands", {})


def unknown_options(words: list[str]) -> list[str]:
    command = _root()
    while words and words[0] in _commands(command):
        command, words = _commands(command)[words[0]], words[1:]
    known = {option for parameter in command.params for option in parameter.opts}
    if _commands(command):
        return [f"no command {words[:1]}"]
    return [word for word in words if word.startswith("--") and word.partition("=")[0] not in known]


@pytest.mark.parametrize("block", of_language(*SHELL), ids=str)
def test_options_of_every_skyrl_command_exist(block: Block) -> None:
    for command in commands_in(block):
        for words in skyrl_commands(command.text):
            assert unknown_options(words) == [], command.text


def revisions_in(text: str) -> list[str]:
    return re.findall(r"\bat (?:revision )?(\d{4})\b", text)


def test_pages_show_the_newest_revision_of_the_schema() -> None:
    shown = {str(block): revisions_in(block.text) for block in of_language(*SHELL)}
    assert any(shown.values())
    assert {block: found for block, found in shown.items() if set(found) - {newest_revision()}} == {}


def test_revisions_are_found() -> None:
    assert revisions_in("the schema is at revision 0007; it was at 0006") == ["0007", "0006"]


def test_skyrl_commands_are_found_and_wrong_options_noticed() -> None:
    line = "sudo -u skyrl skyrl keys list --config /etc/skyrl/skyrl.toml > file"
    assert skyrl_commands(line) == [["keys", "list", "--config", "/etc/skyrl/skyrl.toml"]]
    assert skyrl_commands("/opt/skyrl/.venv/bin/skyrl serve --port 1") == [["serve", "--port", "1"]]
    assert skyrl_commands("sudo useradd skyrl") == []
    assert unknown_options(["keys", "create", "--nmae", "x"]) == ["--nmae"]
    assert unknown_options(["keys", "creat"]) == ["no command ['creat']"]


@pytest.mark.parametrize("block", of_language("toml"), ids=str)
def test_every_configuration_file_of_a_page_loads(block: Block, tmp_path: Path) -> None:
    file = tmp_path / "skyrl.toml"
    file.write_text(block.text)
    load_config({}, file)


@NEEDS_NGINX
@pytest.mark.parametrize("block", of_language("nginx"), ids=str)
def test_nginx_accepts_the_configuration_of_a_page(block: Block, tmp_path: Path) -> None:
    text = block.text if "server {" in block.text else f"server {{ listen 8080; {block.text} }}"
    done = subprocess.run([*write_configuration(tmp_path, text), "-t"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
