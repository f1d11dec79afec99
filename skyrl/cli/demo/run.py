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
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import tinker
from rich.console import Console
from rich.table import Table
from tinker import types

from skyrl.base.tiny.corpus import TASKS, chat_prompt
from skyrl.cli.demo.rl import Settings
from skyrl.cli.demo.server import DemoServer
from skyrl.cli.demo.tenants import Run, Tenant

STREAM_STEPS = 24
GAIN_WINDOW = 5
MIN_GAIN = 0.15
"""How much a tenant's reward must rise: the mean of the last 5 steps minus the mean of the first 5, out of 1."""
JUDGED_STEPS = Settings().steps
"""A shorter run cannot reach MIN_GAIN: its rewards are shown and not judged."""
BASE_MODEL = "tiny"
BACKEND_CONFIG = {"trainer.policy.model.lora.max_lora_rank": 8}
"""vLLM pads every adapter to the maximal rank. On a CPU, two adapters at the same time decode 25 % faster with 8 than
with 32."""
TENANT_TASKS = {"A": "count", "B": "sort"}
STATUS_S = 0.5


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


def measure_latency(base_url: str, idle_samples: int) -> dict[str, float]:
    """One client samples while another client trains: STREAM_STEPS times forward_backward and optim_step, all submitted
    at once. `ratio` is the median latency during this stream, divided by the stream's duration."""
    with (
        tinker.ServiceClient(base_url=base_url, api_key="tml-demo-stream") as training,
        tinker.ServiceClient(base_url=base_url, api_key="tml-demo-reader") as sampling,
    ):
        trainer = training.create_lora_training_client(base_model=BASE_MODEL, rank=8).result()
        tokenizer = trainer.get_tokenizer()
        reader = sampling.create_lora_training_client(base_model=BASE_MODEL, rank=8).result()
        sampler = reader.save_weights_and_get_sampling_client().result()
        rng = random.Random(2)
        params = types.SamplingParams(max_tokens=16, temperature=1.0, stop=[])

        def sample() -> float:
            prompt = tokenizer.encode(chat_prompt(TASKS["count"].prompt(rng)[0]))
            began = time.perf_counter()
            sampler.sample(types.ModelInput.from_ints(prompt), num_samples=1, sampling_params=params).result()
            return time.perf_counter() - began

        def train(steps: int) -> float:
            """The seconds of so many steps, submitted at once."""
            began = time.perf_counter()
            submitted = []
            for _ in range(steps):
                submitted.append(trainer.forward_backward(data, "cross_entropy"))
                submitted.append(trainer.optim_step(types.AdamParams(learning_rate=1e-4)))
            for each in submitted:
                each.result()
            return time.perf_counter() - began

        data = stream_data(32, 128)
        train(1)
        sample()
        idle = [sample() for _ in range(idle_samples)]
        with ThreadPoolExecutor(1) as pool:
            stream = pool.submit(train, STREAM_STEPS)
            busy = [sample()]
            while not stream.done():
                busy.append(sample())
        if len(busy) > 1:
            busy.pop()  # the stream ended while this sample ran
    quantiles = {
        f"{name}_p{percent}_s": float(np.quantile(values, percent / 100))
        for name, values in (("idle", idle), ("busy", busy))
        for percent in (50, 95)
    }
    ratio = quantiles["busy_p50_s"] / stream.result()
    return {**quantiles, "busy_samples": len(busy), "stream_s": stream.result(), "ratio": ratio}


def verdict(runs: dict[str, Run], engine_served: int) -> tuple[list[str], list[str]]:
    """Failed expectations (rewards that did not rise enough, samples that went through the engine), and notes on
    expectations that were not checked."""
    failures = [
        f"tenant {name}: reward rose by {run.gain(GAIN_WINDOW):.2f}, less than {MIN_GAIN}"
        for name, run in runs.items()
        if len(run.rewards) >= JUDGED_STEPS and run.gain(GAIN_WINDOW) < MIN_GAIN
    ]
    if engine_served:
        failures.append(f"{engine_served} samples went through the engine loop")
    fewest = min(len(run.rewards) for run in runs.values())
    short = f"rewards were not judged: {fewest} steps are too few, {JUDGED_STEPS} (the default) are enough"
    return failures, [short] if fewest < JUDGED_STEPS else []


def print_report(console: Console, figures: dict[str, Any]) -> None:
    """Print the figures of `figures.json` as a table."""
    table = Table(title="Results", title_style="bold", show_header=False, box=None, padding=(0, 2))
    table.add_column(justify="left")
    table.add_column(justify="right")
    for name, reward in figures["reward"].items():
        first, last = (f"{np.mean(reward[side]):.2f}" for side in ("first", "last"))
        table.add_row(f"reward of tenant {name}, first to last {len(reward['first'])} steps", f"{first} → {last}")
    table.add_row("samples forwarded to vLLM by the API", str(figures["samples_forwarded"]))
    table.add_row("samples served through the engine loop", str(figures["samples_through_engine"]))
    for key, label in (("latency", ""), ("latency_colocated", " (colocated)")):
        if latency := figures.get(key):
            for name, when in (("idle", "training idle"), ("busy", "during a training stream")):
                p50, p95 = (f"{latency[f'{name}_p{percent}_s'] * 1e3:.0f}" for percent in (50, 95))
                table.add_row(f"sample p50 / p95, {when}{label}", f"{p50} / {p95} ms")
            stream = f"{latency['stream_s']:.1f} s ({latency['busy_samples']} samples)"
            table.add_row(f"  … as a share of the stream's {stream}", f"{latency['ratio']:.3f}")
    for key, label in (("walls", "forwarded"), ("walls_colocated", "colocate_all: true")):
        if walls := figures.get(key):
            both = f"{walls['a_then_b_s']:.1f} / {walls['a_beside_b_s']:.1f} s"
            table.add_row(f"A then B / A beside B, {label}", both)
            table.add_row("  … speed-up", f"{walls['speedup']:.2f}×")
    if gain := figures.get("forwarded_over_colocated_beside"):
        table.add_row("A beside B: forwarding is faster than the engine loop by", f"{gain:.2f}×")
    for phase, seconds in figures["phases_s"].items():
        table.add_row(f"time: {phase}", f"{seconds:.1f} s")
    console.print(table)


def plot(runs: dict[str, Run], file: Path) -> None:
    """Reward curves as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for name, run in runs.items():
        label = f"{name} ({TENANT_TASKS[name]})"
        axes.plot(range(len(run.rewards)), run.rewards, marker="o", markersize=3, label=label)
    axes.set(xlabel="step", ylabel="mean reward", ylim=(0, 1), title="Two tenants, one server, side by side")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


class Demo:
    """One run of the demo."""

    def __init__(self, console: Console, out: Path, settings: Settings, *, compare: bool) -> None:
        self._console = console
        self._out = out
        self._settings = settings
        self._compare = compare
        self._runs: dict[str, Run] = {}
        self._phases: dict[str, float] = {}
        self._figures: dict[str, Any] = {"phases_s": self._phases}

    @contextlib.contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        """Keep the seconds of the phase."""
        started = time.monotonic()
        yield
        self._phases[name] = time.monotonic() - started

    def run(self) -> int:
        """The exit status: 0 if no sample went through the engine, and both rewards rose or were not judged; else 1."""
        self._out.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            directory = Path(tempfile.mkdtemp(prefix="skyrl-demo-"))
            stack.callback(shutil.rmtree, directory, ignore_errors=True)
            tenants = [Tenant(name, task, directory) for name, task in TENANT_TASKS.items()]
            for tenant in tenants:
                stack.callback(tenant.stop)
            server = self._server(stack, directory / "forwarded", colocated=False)
            for tenant in tenants:
                tenant.wait_up()
            self._runs = self._measure(server, tenants, idle_samples=20)
            samples = server.status()["samples"]
            self._figures["samples_forwarded"] = samples["forwarded"]
            self._figures["samples_through_engine"] = samples["engine"]
            server.stop()
            if self._compare:
                server = self._server(stack, directory / "colocated", colocated=True)
                self._measure(server, tenants, idle_samples=5, phase="colocated: ", key="_colocated")
                walls = [self._figures[key]["a_beside_b_s"] for key in ("walls_colocated", "walls")]
                self._figures["forwarded_over_colocated_beside"] = walls[0] / walls[1]
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

    def _measure(
        self, server: DemoServer, tenants: Sequence[Tenant], *, idle_samples: int, phase: str = "", key: str = ""
    ) -> dict[str, Run]:
        """Measure one server; returns the runs side by side. `phase` and `key` tell its phases and figures from the
        other server's. The two steps before drop their results: first steps take longer, and would slow down only the
        order that is measured first."""
        beside, then, latency = (f"{phase}{name}" for name in ("A beside B", "A then B", "sample latency"))
        self._train("warming up", server, tenants, replace(self._settings, steps=2))
        with self._phase(beside):
            runs = self._train(beside, server, tenants, self._settings)
        with self._phase(then):
            for tenant in tenants:
                self._train(then, server, [tenant], self._settings)
        with self._phase(latency), self._console.status(latency):
            self._figures[f"latency{key}"] = measure_latency(server.url, idle_samples)
        serial, parallel = self._phases[then], self._phases[beside]
        walls = {"a_then_b_s": serial, "a_beside_b_s": parallel, "speedup": serial / parallel}
        self._figures[f"walls{key}"] = walls
        return runs

    def _train(self, title: str, server: DemoServer, tenants: Sequence[Tenant], settings: Settings) -> dict[str, Run]:
        """Run these tenants at the same time, and show their progress in one line. Returns the runs by tenant."""
        runs = {tenant.name: Run() for tenant in tenants}
        line = title
        for tenant in tenants:
            tenant.start(server.url, BASE_MODEL, settings)
        with ThreadPoolExecutor(len(tenants)) as pool, self._console.status(title) as status:
            following = [pool.submit(tenant.follow, runs[tenant.name]) for tenant in tenants]
            try:
                running = True
                while running:
                    running = bool(wait(following, STATUS_S).not_done)
                    line = f"{title}: {progress(runs, settings.steps, server.status())}"
                    status.update(line)
            except BaseException:
                for tenant in tenants:
                    tenant.kill()  # ends `follow`, for which the pool waits when it closes
                raise
            for future in following:
                future.result()
        self._console.print(line, soft_wrap=True)
        return runs

    def _report(self) -> int:
        self._figures["reward"] = {name: run.figures(GAIN_WINDOW) for name, run in self._runs.items()}
        curves, file = self._out / "rewards.png", self._out / "figures.json"
        plot(self._runs, curves)
        file.write_text(json.dumps(self._figures, indent=2) + "\n")
        print_report(self._console, self._figures)
        self._console.print(f"reward curves: {curves}, figures: {file}", soft_wrap=True)
        failures, notes = verdict(self._runs, self._figures["samples_through_engine"])
        for note in notes:
            self._console.print(note)
        for failure in failures:
            self._console.print(f"[bold red]failed:[/] {failure}")
        return 1 if failures else 0


def progress(runs: dict[str, Run], steps: int, status: dict[str, Any]) -> str:
    """One line on the runs by tenant. `status`: the server's `/statusz`."""
    parts = [
        f"{name} ({TENANT_TASKS[name]}) step {len(run.rewards)} of {steps}, reward {sum(run.rewards[-1:]):.2f}"
        for name, run in runs.items()
    ]
    samples = status.get("samples", {})
    served = f"samples: {samples.get('forwarded', 0)} forwarded to vLLM, {samples.get('engine', 0)} by the engine loop"
    return "; ".join([*parts, served])


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
