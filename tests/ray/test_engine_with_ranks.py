"""The engine's process with ranks on a Ray cluster: it waits for room, says what is missing, goes on, and ends when a
rank dies."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from skyrl.config.loading import load_config
from skyrl.db.database import Database
from skyrl.db.engine_state import EngineState, read_claim, read_state
from skyrl.db.engine_state import claim as take_claim
from skyrl.processes.runtime import RUNTIME_ENV, Runtime
from skyrl.tiny import model_path
from tests.ray.conftest import LoopbackCluster

SERVER = "server"
WAIT_S = 150.0


class EngineProcess:
    """An engine with two ranks, without vLLM: for adapters, or for full fine-tuning."""

    def __init__(self, state_dir: Path, ray_address: str, url: str, *, full: bool) -> None:
        trainer = {"placement.policy_num_cpu_ranks": 2, "rank_timeout_s": 60, "full_finetuning": full}
        config = load_config(
            {
                "state_dir": state_dir,
                "base_model": str(model_path()),
                "database_url": url,
                "ray_address": ray_address,
                "checkpoint_store": f"file://{state_dir}/store",
                "external_inference_url": None if full else "http://127.0.0.1:9",
                "backend_config": {f"trainer.{key}": value for key, value in trainer.items()},
            }
        )
        (state_dir / "sockets").mkdir(parents=True)
        runtime = Runtime(config, state_dir / "sockets", None, None, SERVER, ray_address=ray_address)
        self.database = Database(url)
        self.database.write(lambda c: take_claim(c, SERVER, read_claim(c)))
        self._log = state_dir / "engine.log"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "skyrl.engine.main"],
                env=os.environ | {RUNTIME_ENV: str(runtime.write())},
                stdout=log,
                stderr=log,
            )

    @property
    def log(self) -> str:
        return self._log.read_text()

    @property
    def state(self) -> EngineState:
        return self.database.read(read_state)

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_S
        while not condition():
            assert self.process.poll() is None, self.log
            assert time.monotonic() < deadline, f"{self.state}\n{self.log}"
            time.sleep(0.1)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.database.close()


@pytest.fixture(params=[False, pytest.param(True, marks=pytest.mark.slow)], ids=["adapters", "whole model"])
def engine(
    ray_cluster: LoopbackCluster, tmp_path: Path, migrated_url: str, request: pytest.FixtureRequest
) -> Iterator[EngineProcess]:
    with closing(EngineProcess(tmp_path / "state", ray_cluster.address, migrated_url, full=request.param)) as engine:
        yield engine
    shutil.rmtree(tmp_path / "state", ignore_errors=True)


def _rank_pids() -> list[int]:
    """The processes of ranks on this machine."""
    found: list[int] = []
    for process in psutil.process_iter(["cmdline"]):
        title: list[str] = process.info["cmdline"] or []
        if title and title[0].startswith("ray::RankActor"):
            found.append(process.pid)
    return found


def test_the_engine_waits_for_its_ranks_and_ends_with_them(engine: EngineProcess, ray_cluster: LoopbackCluster) -> None:
    before = set(_rank_pids())
    engine.until(lambda: engine.state.reason.startswith("waiting for the trainer's ranks: no node has 1 CPU"))
    first = ray_cluster.add_node(CPU=1)
    engine.until(lambda: "for each of 2, and 1 of them fit" in engine.state.reason)
    nodes: list[Any] = [first, ray_cluster.add_node(CPU=1)]
    engine.until(lambda: engine.state.training_ready)
    ranks = sorted(set(_rank_pids()) - before)
    assert len(ranks) == 2
    os.kill(ranks[0], signal.SIGKILL)
    assert engine.process.wait(WAIT_S) == 1
    assert "RankDied: rank " in engine.log
    assert "has died" in engine.log
    assert engine.state.reason == "the engine has stopped"
    for node in nodes:
        ray_cluster.remove_node(node)
