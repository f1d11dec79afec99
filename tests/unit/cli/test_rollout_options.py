"""The options of vLLM in `skyrl rollout`, where nothing else uses its GPUs. No process is started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from skyrl.base.config.loading import dump_config, restore_config
from skyrl.base.config.server import ServerConfig
from skyrl.cli.launcher import rollout_plane
from skyrl.cli.launcher.preflight import Findings
from skyrl.cli.launcher.rollout_plane import Plane
from skyrl.cli.main import app
from skyrl.inference.vllm_command import WEIGHT_UPDATES, vllm_spec

PREFIX = "generator.inference_engine"
EXTENSION = ("--worker-extension-cls", WEIGHT_UPDATES["worker_extension_cls"])


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Runs the command up to the point where processes would start. Returns the configuration of its vLLMs."""

    def run(*flags: str, gpus: tuple[str, ...] = (), env: dict[str, str] | None = None) -> ServerConfig:
        seen: list[ServerConfig] = []

        async def keep(self: Plane, stop: object) -> None:
            seen.append(self._options.config)

        found = Findings(list(gpus), cuda=bool(gpus))
        monkeypatch.setattr(rollout_plane, "check", lambda _: found)
        monkeypatch.setattr(rollout_plane, "check_placed_vllms", lambda *_: found)
        monkeypatch.setattr(Plane, "run", keep)
        ran = CliRunner().invoke(app, ["rollout", "--state-dir", str(tmp_path), *flags], env=env)
        assert ran.exit_code == 0, ran.output
        return seen[0]

    return run


def command(config: ServerConfig, *, cuda: bool) -> tuple[str, ...]:
    """Of a vLLM, as the other processes of the plane get the configuration."""
    return vllm_spec(restore_config(dump_config(config)), 9123, "secret", cuda=cuda).argv


def value(argv: tuple[str, ...], flag: str) -> str | None:
    return argv[argv.index(flag) + 1] if flag in argv else None


@pytest.mark.parametrize("placed", [(), ("--ray-address", "local")])
def test_a_vllm_of_the_plane_has_its_gpu_for_itself_and_can_sleep(started: Any, placed: tuple[str, ...]) -> None:
    argv = command(started(*placed, gpus=("0",)), cuda=True)
    assert value(argv, "--gpu-memory-utilization") == "0.9"
    assert "--enable-sleep-mode" in argv
    assert value(argv, EXTENSION[0]) == EXTENSION[1]
    without = command(started(*placed, "--no-weight-updates", gpus=("0",)), cuda=True)
    assert "--enable-sleep-mode" in without
    assert EXTENSION[0] not in without


def test_without_gpus_there_is_neither(started: Any) -> None:
    argv = command(started(), cuda=False)
    assert EXTENSION[0] in argv
    assert not {"--gpu-memory-utilization", "--enable-sleep-mode", "--no-enable-sleep-mode"} & set(argv)


NESTED = {"generator": {"inference_engine": {"gpu_memory_utilization": 0.4, "engine_init_kwargs": {"seed": 7}}}}
DOTTED = {f"{PREFIX}.gpu_memory_utilization": 0.4, f"{PREFIX}.engine_init_kwargs": {"seed": 7}}
OF_SKYRL = {"generator.gpu_memory_utilization": 0.4, "generator.engine_init_kwargs": {"seed": 7}}


@pytest.mark.parametrize("given", [NESTED, DOTTED, OF_SKYRL], ids=["nested", "dotted", "of SkyRL"])
@pytest.mark.parametrize("where", ["flag", "variable"])
def test_what_the_operator_gives_wins(started: Any, given: dict[str, Any], where: str) -> None:
    text = json.dumps(given)
    flags, env = (("--backend-config", text), {}) if where == "flag" else ((), {"SKYRL_BACKEND_CONFIG": text})
    argv = command(started(*flags, gpus=("0",), env=env), cuda=True)
    assert value(argv, "--gpu-memory-utilization") == "0.4"
    assert value(argv, "--seed") == "7"
    assert value(argv, EXTENSION[0]) == EXTENSION[1]
    assert "--enable-sleep-mode" in argv


def test_the_operator_may_switch_the_planes_own_options_off(started: Any) -> None:
    off = {f"{PREFIX}.engine_init_kwargs": {"enable-sleep-mode": False, "worker-extension-cls": "my.Extension"}}
    argv = command(started("--backend-config", json.dumps(off), gpus=("0",)), cuda=True)
    assert "--no-enable-sleep-mode" in argv
    assert "--enable-sleep-mode" not in argv
    assert value(argv, EXTENSION[0]) == "my.Extension"
