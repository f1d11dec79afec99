"""The processes of a run: null upstream, servers and load generators. Loads run one after the other, and no process is
left behind.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx

from benchmarks.machine import ROOT
from benchmarks.processes import parts_of
from benchmarks.samples import MODEL, LoadSpec
from skyrl.cli.demo.server import DemoServer
from skyrl.runtime.processes.ports import free_port
from skyrl.runtime.processes.supervision import dies_with_parent


class NullUpstream:
    """The null upstream as a process, which `with` starts and ends."""

    def __enter__(self) -> NullUpstream:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "benchmarks.null_upstream", str(port)]
        self._process = subprocess.Popen(dies_with_parent(command))
        self.pid = self._process.pid
        wait_ready(self.url)
        return self

    def control(self, query: str) -> dict[str, int]:
        """Send `delay_ms=200` or `release`; returns the numbers of requests so far and of requests that wait."""
        return httpx.post(f"{self.url}/control?{query}", timeout=30, trust_env=False).json()

    @contextmanager
    def delayed(self, delay_ms: float) -> Generator[None]:
        self.control(f"delay_ms={delay_ms}")
        try:
            yield
        finally:
            self.control("delay_ms=0&release")

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()


def wait_ready(url: str, seconds: float = 60.0) -> None:
    """Wait until a GET is answered with 200. Raises TimeoutError after `seconds`."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with suppress(httpx.TransportError):
            if httpx.get(url, timeout=2, trust_env=False).status_code == 200:
                return
        time.sleep(0.1)
    raise TimeoutError(f"{url} was not ready within {seconds:.0f} s")


def server_of(
    stack: ExitStack, *flags: str, root: Path = ROOT, engine: dict[str, Any] | None = None, **settings: Any
) -> DemoServer:
    """Start a server of the build `root` with an empty database, without waiting for it; the end of the stack stops it.
    `engine` is the backend's configuration, `settings` are keys without a flag."""
    state = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="skyrl-bench-")))
    config = state / "config.toml"
    config.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items()))
    environment = os.environ | {"PYTHONPATH": str(root)}
    flags = ("--config", str(config), *flags)
    server = DemoServer(state, *flags, backend_config=engine, cwd=root, environment=environment)
    stack.callback(server.stop)
    server.start()
    return server


@contextmanager
def ready_server(*flags: str, seconds: float = 180.0, **options: Any) -> Generator[DemoServer]:
    """`server_of` until the block ends, once it can train and sample, within so many seconds."""
    with ExitStack() as stack:
        server = server_of(stack, *flags, **options)
        server.wait_ready(seconds)
        yield server


@contextmanager
def gateway(upstream_url: str, count: int = 1, **settings: Any) -> Generator[DemoServer]:
    """A gateway, a server that only samples, in front of the upstream. Of `count` base models, all behind it, loads ask
    for the last one."""
    names = [*(f"{MODEL}-{number}" for number in range(count - 1)), MODEL]
    entries = [{"base_model": name, "external_inference_url": upstream_url} for name in names]
    one = ("--base-model", MODEL, "--external-inference-url", upstream_url)
    with ExitStack() as stack:
        flags = one if count == 1 else ("--base-models", json.dumps(entries))
        server = server_of(stack, "--backend", "none", *flags, **settings)
        server.wait_api()
        yield server


def trainer(upstream: NullUpstream, **options: Any) -> AbstractContextManager[DemoServer]:
    """A server with an engine. It would forward samples to the upstream, so no vLLM runs."""
    return ready_server("--external-inference-url", upstream.url, **options)


@contextmanager
def _plane(command: str, *flags: str, seconds: float) -> Generator[str]:
    """The URL of `skyrl rollout` or `skyrl router`, which `with` starts and ends."""
    url = f"http://127.0.0.1:{(port := free_port())}"
    argv = (sys.executable, "-m", "skyrl.cli.main", command, "--port", str(port), *flags)
    process = subprocess.Popen(dies_with_parent(argv), stderr=subprocess.DEVNULL)
    try:
        wait_ready(f"{url}/readyz", seconds)
        yield url
    finally:
        process.terminate()
        process.wait()


def router(*workers: str, flags: Sequence[str] = ()) -> AbstractContextManager[str]:
    """The URL of a router in front of these workers."""
    return _plane("router", *flags, "--worker", *workers, seconds=60)


def rollout(directory: Path, model: str, engines: int, options: dict[str, int]) -> AbstractContextManager[str]:
    """The URL of a router with vLLMs of its own. `options`: the backend's configuration."""
    flags = ("--base-model", model, "--num-engines", str(engines), "--backend-config", json.dumps(options))
    return _plane("rollout", "--state-dir", str(directory), *flags, seconds=400)


@dataclass
class Stage:
    """`quick`: use short windows. `calibration_s`: the calibration of this machine. `raw` collects the result of every
    load with the name of its row."""

    upstream: NullUpstream
    quick: bool
    calibration_s: float
    raw: list[dict[str, Any]] = field(default_factory=list)
    _open: ExitStack = field(default_factory=ExitStack)

    @cached_property
    def server(self) -> DemoServer:
        """The gateway that rows share. It starts at the first use."""
        return self._open.enter_context(gateway(self.upstream.url))

    @property
    def window_s(self) -> float:
        return 2.0 if self.quick else 5.0

    def close(self) -> None:
        self._open.close()

    def direct(self, row: str, in_flight: int, **changes: Any) -> dict[str, Any]:
        """A direct load. It takes half as long as a forwarded load, because each row has two of them."""
        half_s, upstream = self.window_s / 2, self.upstream
        spec = LoadSpec(upstream.url, "direct", in_flight, half_s, warm_up_s=0.5, pid=upstream.pid, **changes)
        return self.load(row, "direct", spec)

    def forwarded(self, row: str, server: DemoServer, in_flight: int, **changes: Any) -> dict[str, Any]:
        spec = LoadSpec(server.url, "tinker", in_flight, self.window_s, pid=parts_of(server.pid)["api"])
        return self.load(row, "forwarded", replace(spec, upstream_pid=self.upstream.pid, **changes))

    def load(self, row: str, name: str, spec: LoadSpec) -> dict[str, Any]:
        return self.generate(row, name, "benchmarks.load", json.dumps(asdict(spec)))

    def generate(self, row: str, name: str, module: str, *arguments: str) -> dict[str, Any]:
        """Run a generator process; returns the JSON that it prints. Raises CalledProcessError."""
        command = [sys.executable, "-m", module, *arguments]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=180).stdout
        result = {"row": row, "path": name} | json.loads(output.splitlines()[-1])
        self.raw.append(result)
        return result
