"""The demo: starts a server, runs two tenants, measures, reports, and stops all its processes."""

from __future__ import annotations

import contextlib
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from rich.live import Live

from skyrl.cli.demo.latency import measure
from skyrl.cli.demo.report import Findings, WallTimes, plot, print_report, write_figures
from skyrl.cli.demo.rl import Settings
from skyrl.cli.demo.server import DemoServer
from skyrl.cli.demo.tenants import Run, Tenant
from skyrl.cli.demo.view import live_view

BASE_MODEL = "tiny"
BACKEND_CONFIG = {"trainer.policy.model.lora.max_lora_rank": 8}
"""vLLM pads every adapter to the maximal rank. On a CPU, two adapters at the same time decode 25 % faster with 8 than
with 32."""
STATUS_S = 0.5


class Demo:
    """One run of the demo."""

    def __init__(self, console: Console, out: Path, settings: Settings, *, compare: bool) -> None:
        self._console = console
        self._out = out
        self._settings = settings
        self._compare = compare
        self.findings = Findings()

    @contextlib.contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        yield
        self.findings.phases[name] = time.monotonic() - started

    def run(self) -> int:
        """The exit status: 0 if no sample went through the engine, and both rewards rose or were not judged; else 1."""
        self._out.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            directory = Path(tempfile.mkdtemp(prefix="skyrl-demo-"))
            stack.callback(shutil.rmtree, directory, ignore_errors=True)
            tenants = [Tenant("A", "count", directory), Tenant("B", "sort", directory)]
            for tenant in tenants:
                stack.callback(tenant.stop)
            server = self._server(stack, directory / "forwarded", colocated=False)
            self._forwarded(server, tenants)
            server.stop()
            if self._compare:
                self._colocated(self._server(stack, directory / "colocated", colocated=True), tenants)
        return self._report()

    def _server(self, stack: contextlib.ExitStack, state_dir: Path, *, colocated: bool) -> DemoServer:
        kind = "colocated" if colocated else "forwarding"
        config = {**BACKEND_CONFIG, "trainer.placement.colocate_all": colocated}
        server = DemoServer(state_dir, backend_config=config)
        stack.callback(server.stop)
        with self._phase(f"start of the {kind} server"), self._console.status(f"starting the {kind} server"):
            server.start()
            server.wait_ready()
        self._console.print(f"the {kind} server was ready after {server.ready_s:.1f} s")
        return server

    def _forwarded(self, server: DemoServer, tenants: list[Tenant]) -> None:
        for tenant in tenants:
            tenant.wait_up()
        self._warm_up(server, tenants)
        with self._phase("A beside B"):
            parallel, self.findings.runs = self._parallel(server, tenants, "A beside B, samples forwarded")
        with self._phase("A then B"):
            serial = self._serial(server, tenants, "A then B, samples forwarded")
        self.findings.walls = WallTimes(serial, parallel)
        with self._phase("sample latency"), self._console.status("measuring sample latency"):
            self.findings.latency = measure(server.url, BASE_MODEL)
        samples = server.status()["samples"]
        self.findings.forwarded, self.findings.engine_served = samples["forwarded"], samples["engine"]

    def _colocated(self, server: DemoServer, tenants: list[Tenant]) -> None:
        self._warm_up(server, tenants)
        with self._phase("colocated: A beside B"):
            parallel, _ = self._parallel(server, tenants, "A beside B, everything through the engine loop")
        with self._phase("colocated: A then B"):
            serial = self._serial(server, tenants, "A then B, everything through the engine loop")
        self.findings.colocated_walls = WallTimes(serial, parallel)
        with self._phase("colocated: sample latency"), self._console.status("measuring sample latency, colocated"):
            self.findings.colocated_latency = measure(server.url, BASE_MODEL, idle_samples=5)

    def _warm_up(self, server: DemoServer, tenants: list[Tenant]) -> None:
        """Run two steps of each tenant and drop the results: first steps take longer, and would slow down only the
        order that is measured first."""
        with self._console.status("warming up"):
            for tenant in tenants:
                tenant.start(server.url, BASE_MODEL, replace(self._settings, steps=2))
            for tenant in tenants:
                tenant.follow(Run(), lambda: None)

    def _parallel(self, server: DemoServer, tenants: list[Tenant], title: str) -> tuple[float, dict[str, Run]]:
        """Run the tenants at the same time. Returns wall-clock seconds, and the runs by tenant."""
        runs = {tenant.name: Run() for tenant in tenants}
        started = time.monotonic()
        self._follow(server, tenants, runs, title)
        return time.monotonic() - started, runs

    def _serial(self, server: DemoServer, tenants: list[Tenant], title: str) -> float:
        """Run one tenant after the other. Returns wall-clock seconds."""
        started = time.monotonic()
        runs = {tenant.name: Run() for tenant in tenants}
        for tenant in tenants:
            self._follow(server, [tenant], runs, title)
        return time.monotonic() - started

    def _follow(self, server: DemoServer, tenants: list[Tenant], runs: dict[str, Run], title: str) -> None:
        """Run these tenants at the same time, and show their progress."""
        done = threading.Event()
        for tenant in tenants:
            tenant.start(server.url, BASE_MODEL, self._settings)
        tasks = {"A": "count", "B": "sort"}

        def render(status: dict[str, Any]) -> Any:
            shown = {name: (tasks[name], run) for name, run in runs.items()}
            return live_view(title, shown, self._settings.steps, status)

        with (
            Live(render({}), console=self._console, auto_refresh=False) as live,
            ThreadPoolExecutor(len(tenants)) as pool,
        ):
            following = [pool.submit(tenant.follow, runs[tenant.name], lambda: None) for tenant in tenants]
            try:
                while not all(future.done() for future in following):
                    done.wait(STATUS_S)
                    live.update(render(server.status()), refresh=True)
            except BaseException:
                for tenant in tenants:
                    tenant.kill()  # ends `follow`, for which the pool waits when it closes
                raise
            for future in following:
                future.result()
        if not self._console.is_terminal:
            self._console.print()  # in a file, the live view ends without a newline

    def _report(self) -> int:
        findings = self.findings
        plot({f"{name} ({task})": findings.runs[name] for name, task in (("A", "count"), ("B", "sort"))}, self._plot)
        write_figures(findings, self._out / "figures.json")
        print_report(self._console, findings)
        self._console.print(f"reward curves: {self._plot}, figures: {self._out / 'figures.json'}", soft_wrap=True)
        for note in findings.notes():
            self._console.print(note)
        for failure in findings.failures():
            self._console.print(f"[bold red]failed:[/] {failure}")
        return 1 if findings.failures() else 0

    @property
    def _plot(self) -> Path:
        return self._out / "rewards.png"


def run_demo(out: Path, settings: Settings, *, compare: bool) -> int:
    """The exit status: 0 for success, 1 for a failed expectation, 130 after Ctrl-C, SIGTERM or SIGHUP."""
    console = Console()

    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupt)
    try:
        return Demo(console, out, settings, compare=compare).run()
    except KeyboardInterrupt:
        console.print("stopped")
        return 130
