"""The options of vLLM in `skyrl rollout`, where nothing else uses its GPUs. No process is started."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from skyrl.base.config.loading import dump_config, restore_config
from skyrl.base.config.server import ConfigError, ServerConfig
from skyrl.cli.launcher import preflight, rollout_plane
from skyrl.cli.launcher.preflight import Findings, check_inference_port
from skyrl.cli.launcher.rollout_plane import Plane, PlaneOptions
from skyrl.cli.main import app
from skyrl.inference import features
from skyrl.inference.engine_kinds import RolloutVllm
from skyrl.inference.placement import Spot
from skyrl.inference.remote.settings import PlacedSidecar
from skyrl.inference.sidecar import main as sidecar_process
from skyrl.inference.sidecar.settings import SidecarSettings
from skyrl.inference.vllm_command import WEIGHT_UPDATES, vllm_spec
from skyrl.runtime.processes import runtime
from skyrl.runtime.processes.systemd import Systemd

PREFIX = "generator.inference_engine"
EXTENSION = ("--worker-extension-cls", WEIGHT_UPDATES["worker_extension_cls"])


@pytest.fixture(autouse=True)
def _keeps_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "set_up_process", lambda *_: None)


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


def test_vllm_may_have_any_port_but_the_routers(started: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "check_free", lambda _: None)

    def with_port(port: int) -> ServerConfig:
        return started("--backend-config", json.dumps({f"{PREFIX}.port": port}))

    assert with_port(8000).port == 30_000
    check_inference_port(with_port(8000))
    with pytest.raises(ConfigError, match="30000 is this server's own port"):
        check_inference_port(with_port(30_000))


def known_file_of(argv: tuple[str, ...], env: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Path | None:
    """Where the sidecar of this command keeps what the next one must know."""
    seen: list[SidecarSettings] = []
    monkeypatch.setattr(sidecar_process, "run_sidecar", seen.append)
    ran = CliRunner().invoke(app, argv[argv.index("sidecar") :], env=env)
    assert ran.exit_code == 0, ran.output
    return seen[0].known_file


@pytest.mark.parametrize(
    ("flags", "most", "level"),
    [((), 64 * 2**20, "info"), (("--max-body-bytes", str(2**27), "--log-level", "debug"), 2**27, "debug")],
    ids=["defaults", "given"],
)
def test_sidecars_take_the_routers_bodies_and_log_at_its_level(
    started: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flags: tuple[str, ...], most: int, level: str
) -> None:
    config = started(*flags)
    commands: list[tuple[str, ...]] = []
    environments: list[dict[str, str]] = []

    async def add(*_: object) -> None:
        pass

    def part(_: Plane, name: str, argv: tuple[str, ...], needs: object, env: dict[str, str], *__: object) -> None:
        commands.append(argv)
        environments.append(env)

    monkeypatch.setattr(
        rollout_plane, "InferenceParts", lambda *_, **__: SimpleNamespace(replica_urls=("http://v:1",), parts=list)
    )
    monkeypatch.setattr(Plane, "_add", add)
    monkeypatch.setattr(Plane, "_part", part)

    async def start() -> None:
        plane = Plane(PlaneOptions(config, "127.0.0.1", 30_000, 1, ()), Findings([]), Systemd())
        with plane._held:
            await plane._start(tmp_path, rollout_plane.Starts(tmp_path))

    asyncio.run(start())
    sidecar, _ = commands
    assert (value(sidecar, "--max-body-bytes"), value(sidecar, "--log-level")) == (str(most), level)
    assert known_file_of(sidecar, environments[0], monkeypatch) == tmp_path / "sidecar-0.json"
    placed = RolloutVllm(config, "key").spec("vllm-0", Spot("127.0.0.1", 1, None, cuda=False, sidecar_port=2)).sidecar
    assert placed is not None
    settings = PlacedSidecar.from_environment(placed.env)
    assert (settings.max_body_bytes, settings.log_level) == (most, level)


def test_without_engines_neither_vllm_nor_a_model_is_needed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(features, "vllm_version", lambda: "")
    (tmp_path / "file").touch()
    flags = ("--state-dir", str(tmp_path / "file" / "state"), "--base-model", "./nowhere")
    ran = CliRunner().invoke(app, ["rollout", "--num-engines", "0", "--engine-url", "http://127.0.0.1:1", *flags])
    assert ran.exit_code == 2
    assert "skyrl rollout: state-dir: cannot write to" in ran.output
