"""Ports that are held while their server does not listen, and how a vLLM that runs here keeps its port."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from skyrl.base.config.loading import load_config
from skyrl.base.config.server import ConfigError, ServerConfig
from skyrl.cli.launcher import inference_parts
from skyrl.cli.launcher.first_ready import Supervised
from skyrl.cli.launcher.inference_parts import InferenceParts
from skyrl.cli.launcher.metrics import RestartMetrics
from skyrl.cli.launcher.parts import Parts
from skyrl.cli.launcher.preflight import Findings
from skyrl.inference.engine_kinds import Vllm
from skyrl.inference.placement import LocalPlacement, ServerPlan, ServerSpec, Spot
from skyrl.runtime.processes.ports import FIRST_PORT, LOOPBACK, PORTS, HeldPort, HeldPorts, check_free, free_port
from skyrl.runtime.processes.startup import Cause, FirstStarts

WAIT_S = 60.0
SERVER = """
import os, socket, sys, time
port, go = int(sys.argv[1]), sys.argv[2]
print("imports", flush=True)
while not os.path.exists(go):
    time.sleep(0.01)
server = socket.socket()
server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
server.bind(("127.0.0.1", port))
print("loads", flush=True)
time.sleep(0.2)
server.listen()
while True:
    server.accept()[0].close()
"""
"""Takes its port as vLLM does: long after its start, and long before it listens."""


@contextmanager
def listening(port: int) -> Iterator[None]:
    """A program that was told this port."""
    with socket.socket() as stranger:
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        stranger.bind((LOOPBACK, port))
        stranger.listen()
        yield


def is_free(port: int) -> bool:
    """Whether a program that looks for a free port may find this one."""
    with socket.socket() as probe:
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
    return True


def answers(port: int) -> bool:
    try:
        socket.create_connection((LOOPBACK, port), timeout=WAIT_S).close()
    except ConnectionRefusedError:
        return False
    return True


async def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "the condition did not hold in time"
        await asyncio.sleep(0.01)


def test_a_held_port_is_nobody_elses_and_refuses_connections() -> None:
    held = HeldPort.any()
    assert FIRST_PORT <= held.number < FIRST_PORT + PORTS
    assert not is_free(held.number)
    with pytest.raises(OSError, match="already in use"):
        HeldPort(held.number)
    assert not answers(held.number)
    check_free(held.number)  # for the server that it is held for
    held.close()
    assert is_free(held.number)


def test_no_program_that_asks_for_any_port_gets_a_held_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        number = probe.getsockname()[1]  # in the range from which the kernel gives ports
    held = HeldPort(number)
    given: set[int] = set()
    for _ in range(200):
        with socket.socket() as other:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            other.bind((LOOPBACK, 0))
            given.add(other.getsockname()[1])
    held.close()
    assert number not in given
    ports = iter((5, 6))
    monkeypatch.setattr("secrets.randbelow", lambda _: next(ports))
    with HeldPorts() as first:
        assert first.take(1, but_not={FIRST_PORT + 5}) == [FIRST_PORT + 6]
        ports = iter((6, 7))
        assert free_port() == FIRST_PORT + 7
    assert is_free(FIRST_PORT + 6)


@dataclass(frozen=True)
class LikeVllm(Vllm):
    """Runs SERVER. It takes its port when the file `go` is there."""

    def spec(self, name: str, spot: Spot) -> ServerSpec:
        argv = (sys.executable, "-S", "-c", SERVER, str(spot.port), str(self.config.state_dir / "go"))
        return ServerSpec(argv, {}, spot.host, spot.port, f"{name}.log")


class Observer:
    """Says after each end whether another start is hopeless, as `FirstReady` and `Starts` find it."""

    def __init__(self) -> None:
        self.ends: list[tuple[str, bool]] = []
        self._starts = FirstStarts()

    def watch(self, name: str, process: Supervised) -> None:
        pass

    def ended(self, name: str, code: int, cause: Cause | None) -> None:
        self.ends.append(("" if cause is None else cause.sentence, self._starts.hopeless(name, cause)))


@dataclass
class Servers:
    """The parts of vLLMs, and the ports of the vLLMs."""

    made: InferenceParts
    observer: Observer
    parts: Parts

    @property
    def ports(self) -> list[int]:
        return [int(url.rpartition(":")[2]) for url in self.made.replica_urls]

    async def start(self) -> None:
        for part in self.made.parts(()):
            if part.name in ("vllm", "vllm-0", "vllm-1"):
                await self.parts.add(part)


def servers(config: ServerConfig, held: HeldPorts, monkeypatch: pytest.MonkeyPatch) -> Servers:
    monkeypatch.setattr(inference_parts, "Vllm", LikeVllm)
    observer, metrics = Observer(), RestartMetrics(CollectorRegistry())
    placement = LocalPlacement(config.state_dir / "logs")
    return Servers(InferenceParts(config, Findings([]), "key", placement, observer, metrics, held), observer, Parts())


def config_of(tmp_path: Path, **inference: object) -> ServerConfig:
    keys = {f"generator.inference_engine.{name}": value for name, value in inference.items()}
    return load_config({"state_dir": tmp_path, "backend_config": keys})


async def test_a_vllm_has_its_port_from_the_choice_on_and_between_its_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with HeldPorts() as held:
        running = servers(config_of(tmp_path, num_engines=2), held, monkeypatch)
        await running.start()
        logs = [tmp_path / "logs" / f"vllm-{number}.log" for number in range(2)]
        await wait_until(lambda: all(log.exists() and "imports" in log.read_text() for log in logs))
        assert [is_free(port) for port in running.ports] == [False, False]
        (tmp_path / "go").touch()
        await wait_until(lambda: all(map(answers, running.ports)))
        (tmp_path / "go").unlink()
        server = running.made._servers[0].server
        assert server.incarnation is not None
        assert server.restart(server.incarnation)
        await wait_until(lambda: logs[0].read_text().count("imports") == 2)
        assert not is_free(running.ports[0])
        (tmp_path / "go").touch()
        await wait_until(lambda: answers(running.ports[0]))
        assert [sentence for sentence, _ in running.observer.ends] == [""], "only the killed one has ended"
        await running.parts.stop()
        assert not any(map(answers, running.ports))


async def test_a_server_whose_placement_has_chosen_its_port_holds_it_to_its_end(tmp_path: Path) -> None:
    kind = LikeVllm(config_of(tmp_path), "key")
    server = await LocalPlacement(tmp_path).start(ServerPlan("vllm", kind, cuda=False))
    port = int(server.url.rpartition(":")[2])
    assert not is_free(port)
    await server.stop()
    assert is_free(port)


@pytest.mark.parametrize("configured", [False, True])
async def test_a_port_that_is_taken_all_the_same_is_told_and_hopeless_after_two_starts(
    configured: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(tmp_path, **({"port": free_port()} if configured else {}))
    with HeldPorts() as held, caplog.at_level(logging.WARNING):
        running = servers(config, held, monkeypatch)
        (port,) = running.ports
        (tmp_path / "go").touch()
        with listening(port):
            await running.start()
            await wait_until(lambda: len(running.observer.ends) == 2)
        await wait_until(lambda: answers(port))  # as soon as the port is free again
        await running.parts.stop()
    setting = "generator.inference_engine.port: " if configured else ""
    told = f"{setting}another process has taken vLLM's port (OSError: [Errno 98] Address already in use)"
    assert running.observer.ends == [(told, False), (told, True)]
    assert caplog.text.count(f"vllm (http://127.0.0.1:{port}): {told}") == 2


def test_a_configured_port_with_a_server_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    told = f"generator.inference_engine.port: vLLM cannot listen on 127.0.0.1:{port} "
    with HeldPorts() as held, listening(port), pytest.raises(ConfigError, match=told):
        servers(config_of(tmp_path, port=port), held, monkeypatch)
    with HeldPorts() as held:
        servers(config_of(tmp_path, port=port), held, monkeypatch)
        assert not is_free(port)
    assert is_free(port)
