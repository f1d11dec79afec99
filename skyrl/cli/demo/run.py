"""The demo: starts a server, runs two tenants, measures, reports, and stops all its processes.

Measured are the runs' wall times, and the latency of a sample through the SDK: while training is idle, and during a
training stream. The report is a table, a plot, and a JSON file with all figures.
"""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import tinker
from rich.console import Console
from rich.live import Live
from rich.table import Table
from tinker import types

from skyrl.base.tiny.corpus import TASKS, chat_prompt
from skyrl.cli.demo.rl import Settings
from skyrl.cli.demo.server import DemoServer
from skyrl.cli.demo.tenants import Run, Tenant, live_view

STREAM_STEPS = 24


@dataclass(frozen=True)
class Latency:
    """Seconds. `stream` is the duration of the training stream, `busy` the latencies of samples during the stream."""

    idle: list[float]
    busy: list[float]
    stream: float

    @staticmethod
    def quantile(values: list[float], q: float) -> float:
        return float(np.quantile(values, q))

    @property
    def ratio(self) -> float:
        """The median latency during the stream, divided by the stream's duration."""
        return self.quantile(self.busy, 0.5) / self.stream


def stream_data(sequences: int, length: int) -> list[types.Datum]:
    """Cross-entropy data of random tokens: `sequences` sequences of `length` tokens."""
    rng = random.Random(1)
    data = []
    for _ in range(sequences):
        tokens = [rng.randrange(300, 500) for _ in range(length + 1)]
        data.append(
            types.Datum(
                model_input=types.ModelInput.from_ints(tokens[:-1]),
                loss_fn_inputs={
                    "target_tokens": types.TensorData.from_numpy(np.asarray(tokens[1:], np.int64)),
                    "weights": types.TensorData.from_numpy(np.ones(length, np.float32)),
                },
            )
        )
    return data


def _client(base_url: str, name: str) -> tinker.ServiceClient:
    return tinker.ServiceClient(base_url=base_url, api_key=f"tml-demo-{name}")


def measure_latency(
    base_url: str, base_model: str, *, idle_samples: int = 20, sequences: int = 32, length: int = 128
) -> Latency:
    """One client samples while another client trains: STREAM_STEPS times forward_backward and optim_step, all submitted
    at once."""
    with _client(base_url, "stream") as training, _client(base_url, "reader") as sampling:
        trainer = training.create_lora_training_client(base_model=base_model, rank=8).result()
        tokenizer = trainer.get_tokenizer()
        reader = sampling.create_lora_training_client(base_model=base_model, rank=8).result()
        sampler = reader.save_weights_and_get_sampling_client().result()
        task = TASKS["count"]
        rng = random.Random(2)

        def sample() -> float:
            prompt = tokenizer.encode(chat_prompt(task.prompt(rng)[0]))
            params = types.SamplingParams(max_tokens=16, temperature=1.0, stop=[])
            began = time.perf_counter()
            sampler.sample(types.ModelInput.from_ints(prompt), num_samples=1, sampling_params=params).result()
            return time.perf_counter() - began

        data = stream_data(sequences, length)
        trainer.forward_backward(data, "cross_entropy").result()
        trainer.optim_step(types.AdamParams(learning_rate=1e-4)).result()
        sample()
        idle = [sample() for _ in range(idle_samples)]
        began = time.perf_counter()
        stream = []
        for _ in range(STREAM_STEPS):
            stream.append(trainer.forward_backward(data, "cross_entropy"))
            stream.append(trainer.optim_step(types.AdamParams(learning_rate=1e-4)))
        with ThreadPoolExecutor(1) as waiter:
            trained = waiter.submit(lambda: ([future.result() for future in stream], time.perf_counter())[1])
            busy = []
            while not trained.done():
                latency = sample()
                if not trained.done() or not busy:
                    busy.append(latency)
            return Latency(idle, busy, trained.result() - began)


GAIN_WINDOW = 5
MIN_GAIN = 0.15
"""How much a tenant's reward must rise: the mean of the last 5 steps minus the mean of the first 5, out of 1."""
JUDGED_STEPS = Settings().steps
"""A shorter run cannot reach MIN_GAIN: its rewards are shown and not judged."""


@dataclass
class WallTimes:
    """Seconds for the tenants one after the other (`serial`), and at the same time (`parallel`)."""

    serial: float
    parallel: float

    @property
    def speedup(self) -> float:
        return self.serial / self.parallel


@dataclass
class Findings:
    """All results of one demo. `phases`: seconds per phase, in order."""

    runs: dict[str, Run] = field(default_factory=dict)
    forwarded: int = 0
    engine_served: int = 0
    latency: Latency | None = None
    walls: WallTimes | None = None
    colocated_walls: WallTimes | None = None
    colocated_latency: Latency | None = None
    phases: dict[str, float] = field(default_factory=dict)

    def failures(self) -> list[str]:
        """Failed expectations: rewards that did not rise enough, samples that went through the engine."""
        failures = [
            f"tenant {name}: reward rose by {run.gain(GAIN_WINDOW):.2f}, less than {MIN_GAIN}"
            for name, run in self.runs.items()
            if len(run.rewards) >= JUDGED_STEPS and run.gain(GAIN_WINDOW) < MIN_GAIN
        ]
        if self.engine_served:
            failures.append(f"{self.engine_served} samples went through the engine loop")
        return failures

    def notes(self) -> list[str]:
        """Expectations that were not checked, and why."""
        short = [len(run.rewards) for run in self.runs.values() if len(run.rewards) < JUDGED_STEPS]
        if not short:
            return []
        return [f"rewards were not judged: {min(short)} steps are too few, {JUDGED_STEPS} (the default) are enough"]

    def figures(self) -> dict[str, Any]:
        """The figures as JSON: counts, seconds and ratios."""
        figures: dict[str, Any] = {
            "reward": {
                name: {"first": r.rewards[:GAIN_WINDOW], "last": r.rewards[-GAIN_WINDOW:], "gain": r.gain(GAIN_WINDOW)}
                for name, r in self.runs.items()
            },
            "samples_forwarded": self.forwarded,
            "samples_through_engine": self.engine_served,
            "phases_s": self.phases,
        }
        for key, latency in (("latency", self.latency), ("latency_colocated", self.colocated_latency)):
            if latency is not None:
                figures[key] = {
                    "idle_p50_s": latency.quantile(latency.idle, 0.5),
                    "idle_p95_s": latency.quantile(latency.idle, 0.95),
                    "busy_p50_s": latency.quantile(latency.busy, 0.5),
                    "busy_p95_s": latency.quantile(latency.busy, 0.95),
                    "busy_samples": len(latency.busy),
                    "stream_s": latency.stream,
                    "ratio": latency.ratio,
                }
        for key, walls in (("walls", self.walls), ("walls_colocated", self.colocated_walls)):
            if walls is not None:
                figures[key] = {
                    "a_then_b_s": walls.serial,
                    "a_beside_b_s": walls.parallel,
                    "speedup": walls.speedup,
                }
        if self.walls is not None and self.colocated_walls is not None:
            figures["forwarded_over_colocated_beside"] = self.colocated_walls.parallel / self.walls.parallel
        return figures


def print_report(console: Console, findings: Findings) -> None:
    table = Table(title="Results", title_style="bold", show_header=False, box=None, padding=(0, 2))
    table.add_column(justify="left")
    table.add_column(justify="right")
    for name, run in findings.runs.items():
        window = min(GAIN_WINDOW, max(1, len(run.rewards) // 2))
        first, last = sum(run.rewards[:window]) / window, sum(run.rewards[-window:]) / window
        table.add_row(f"reward of tenant {name}, first to last {window} steps", f"{first:.2f} → {last:.2f}")
    table.add_row("samples forwarded to vLLM by the API", str(findings.forwarded))
    table.add_row("samples served through the engine loop", str(findings.engine_served))
    for label, latency in (("", findings.latency), (" (colocated)", findings.colocated_latency)):
        if latency is None:
            continue
        idle = f"{latency.quantile(latency.idle, 0.5) * 1e3:.0f} / {latency.quantile(latency.idle, 0.95) * 1e3:.0f} ms"
        busy = f"{latency.quantile(latency.busy, 0.5) * 1e3:.0f} / {latency.quantile(latency.busy, 0.95) * 1e3:.0f} ms"
        table.add_row(f"sample p50 / p95, training idle{label}", idle)
        table.add_row(f"sample p50 / p95, during a training stream{label}", busy)
        table.add_row(
            f"  … as a share of the stream's {latency.stream:.1f} s ({len(latency.busy)} samples)",
            f"{latency.ratio:.3f}",
        )
    for label, walls in (("forwarded", findings.walls), ("colocate_all: true", findings.colocated_walls)):
        if walls is not None:
            table.add_row(f"A then B / A beside B, {label}", f"{walls.serial:.1f} / {walls.parallel:.1f} s")
            table.add_row("  … speed-up", f"{walls.speedup:.2f}×")
    if findings.walls is not None and findings.colocated_walls is not None:
        gain = findings.colocated_walls.parallel / findings.walls.parallel
        table.add_row("A beside B: forwarding is faster than the engine loop by", f"{gain:.2f}×")
    for phase, seconds in findings.phases.items():
        table.add_row(f"time: {phase}", f"{seconds:.1f} s")
    console.print(table)


def plot(runs: dict[str, Run], file: Path) -> None:
    """Reward curves as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for name, run in runs.items():
        axes.plot(range(len(run.rewards)), run.rewards, marker="o", markersize=3, label=name)
    axes.set(xlabel="step", ylabel="mean reward", ylim=(0, 1), title="Two tenants, one server, side by side")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


def write_figures(findings: Findings, file: Path) -> None:
    file.write_text(json.dumps(findings.figures(), indent=2) + "\n")


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
            self.findings.latency = measure_latency(server.url, BASE_MODEL)
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
            self.findings.colocated_latency = measure_latency(server.url, BASE_MODEL, idle_samples=5)

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
