"""Reads the files of deploy/: YAML documents, the Dockerfile, and commands as skyrl's own command line reads them.

Knows the forms of the files, and checks nothing.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from skyrl.base.config.loading import load_config
from skyrl.base.config.server import ServerConfig
from skyrl.cli.main import app
from skyrl.inference.vllm_command import vllm_spec
from tests.pages import ROOT

DEPLOY = ROOT / "deploy"
SETTINGS = {
    "POSTGRES_PASSWORD": "0a1b2c",
    "GRAFANA_PASSWORD": "3d4e5f",
    "GATEWAY_KEY": "6a7b8c",
    "GATEWAY_GPU": "2",
    "BASE_MODEL": "/models/Qwen3-8B",
    "MODEL_NAME": "Qwen/Qwen3-8B",
    "HARDWARE": "gpu",
}
"""What an operator may write into `.env`."""

_VARIABLE = re.compile(r"\$\{(\w+)(?::([-?])([^}]*))?\}")


class NotSet(Exception):
    """A variable that must be set is not."""


def documents(path: Path) -> list[dict[str, Any]]:
    """The documents of a YAML file."""
    return list(yaml.safe_load_all(path.read_text()))


def interpolated(value: Any, settings: Mapping[str, str]) -> Any:
    """The value as Compose reads it with these settings. Raises NotSet for `${NAME:?...}` without a value."""

    def variable(match: re.Match[str]) -> str:
        name, operator, rest = match.groups()
        if operator == "?" and not settings.get(name):
            raise NotSet(name)
        return settings.get(name) or (rest if operator == "-" else "")

    if isinstance(value, str):
        return _VARIABLE.sub(variable, value)
    if isinstance(value, list):
        return [interpolated(each, settings) for each in value]
    if isinstance(value, dict):
        return {key: interpolated(each, settings) for key, each in value.items()}
    return value


def strings(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    """All strings of a document, each with the keys that lead to it."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from strings(each, (*path, str(key)))
    elif isinstance(value, list):
        for number, each in enumerate(value):
            yield from strings(each, (*path, str(number)))


def dockerfile() -> list[tuple[str, str]]:
    """The instructions of the Dockerfile, each with its text on one line."""
    lines = [line for line in (DEPLOY / "Dockerfile").read_text().splitlines() if not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [(line.split()[0], line.partition(" ")[2].strip()) for line in joined.splitlines() if line.strip()]


def of_image(instruction: str) -> str:
    """The text of the last instruction of this kind: the finished image has that one."""
    return [text for name, text in dockerfile() if name == instruction][-1]


def image_environment() -> dict[str, str]:
    """The variables of the finished image by which skyrl is configured."""
    assigned = dict(word.split("=", 1) for word in shlex.split(of_image("ENV")))
    return {name: value for name, value in assigned.items() if name.startswith("SKYRL_")}


def health_check() -> list[str]:
    return json.loads(of_image("HEALTHCHECK").partition("CMD ")[2])


ReadServe = Callable[[Sequence[str], Mapping[str, str]], ServerConfig]


@pytest.fixture
def read_serve(monkeypatch: pytest.MonkeyPatch) -> ReadServe:
    """A function: the configuration with which `skyrl WORDS` would start a server, with these variables alone.

    The function fails when skyrl refuses an option, a variable or a value.
    """

    def read(words: Sequence[str], variables: Mapping[str, str]) -> ServerConfig:
        for name in list(os.environ):
            if name.startswith("SKYRL_") and not name.startswith("SKYRL_TEST_"):
                monkeypatch.delenv(name)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        started: list[ServerConfig] = []
        monkeypatch.setattr("skyrl.cli.launcher.main.serve", started.append)
        result = CliRunner().invoke(app, list(words))
        assert result.exit_code == 0, result.output
        [config] = started
        return config

    return read


SET_BY_OPERATOR = {"--model", "--served-model-name", "--host", "--port", "--gpu-memory-utilization"}
FOR_OWN_VLLM = {"--seed", "--middleware"}
"""Options of the vLLM that `skyrl serve` starts, and that another vLLM does without."""
OF_THE_MODEL = {"--enable-auto-tool-choice", "--tool-call-parser", "--reasoning-parser"}
"""Options by the model's template, which the tiny model's has no need of."""


def check_vllm(words: Sequence[str], variables: Mapping[str, str]) -> None:
    """Fail unless these options and variables are those of the vLLM that `skyrl serve` starts on a GPU."""
    spec = vllm_spec(load_config({"base_model": "tiny"}), 8000, "key", cuda=True)
    own = _options(spec.argv[4:])
    given = _options([part for word in words for part in word.split("=", 1)])
    assert given.keys() - OF_THE_MODEL == own.keys() - FOR_OWN_VLLM
    assert [name for name in given.keys() - SET_BY_OPERATOR - OF_THE_MODEL if given[name] != own[name]] == []
    told = {name: value for name, value in variables.items() if name.startswith(("VLLM_", "TOKENIZERS_"))}
    assert "VLLM_API_KEY" in told
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING" in told
    assert [name for name in told if name != "VLLM_API_KEY" and told[name] != spec.env.get(name)] == []


def _options(words: Sequence[str]) -> dict[str, list[str]]:
    options: dict[str, list[str]] = {}
    for word in words:
        if word.startswith("--"):
            options[word] = []
        else:
            options[list(options)[-1]].append(word)
    return options
