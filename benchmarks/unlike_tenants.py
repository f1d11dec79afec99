"""Tenants who differ on one server: how long a step of each takes alone, and beside the others.

    python -m benchmarks.unlike_tenants [--quick] [--against COMMIT] [--rounds 1] [--alone 5] [--together 30]
                                        [--out FILE]

A real `skyrl serve` with the tiny model that sees and real vLLM; four tenants (`benchmarks/unlike_load.py`): one with
prompts of 10,000 tokens, one with pictures, one with agents that must call one of 300 tools in each turn, one with tiny
steps of RL. A round lets each run alone, then all together. The bound of a step is its share, the number of tenants
times its time alone, and one pass: the longest part of a step of another tenant alone. While all run, a GET every 50 ms
shows how long the API's event loop lets a request wait. With `--against` rounds alternate with a server of that commit.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx

from benchmarks import program
from benchmarks.machine import ROOT, facts
from benchmarks.processes import computing_of, cpu_seconds
from benchmarks.series import quantile
from benchmarks.table import Row, Target, text_table
from benchmarks.unlike_load import KINDS, MODEL
from skyrl.base.tiny import tools, vision
from skyrl.cli.demo.server import DemoServer
from skyrl.runtime.processes.supervision import dies_with_parent

CONTEXT = 24_576
ENGINE = {"generator.inference_engine.max_model_len": CONTEXT, "trainer.policy.model.lora.max_lora_rank": 8}
SHOWN = ("tool | tojson", "tool.function.name + ': ' + tool.function.description")
"""The tiny tokenizer makes 130 tokens of a tool's JSON, others some 40: so 300 tools have 10,000 tokens."""
READY_S = 300.0
PARTS = ("save_s", "sample_s", "train_s")
Steps = list[dict[str, float]]


class Side:
    """A server of one build, and its tenants."""

    def __init__(self, name: str, root: Path, model: Path, stack: ExitStack) -> None:
        self.name, self._model = name, model
        state = Path(stack.enter_context(TemporaryDirectory(prefix="skyrl-unlike-")))
        flags = ("--base-model", str(model), "--served-model-name", MODEL)
        environment = os.environ | {"PYTHONPATH": str(root)}
        self._server = DemoServer(state, *flags, backend_config=ENGINE, cwd=root, environment=environment)
        self._server.start()
        stack.callback(self._server.stop)
        self._stack = stack
        self._tenants: dict[str, subprocess.Popen[str]] = {}

    def begin(self) -> None:
        """Wait for the server, and let each tenant make a step, which takes longer than later ones."""
        self._server.wait_ready(READY_S)
        for kind in KINDS:
            command = [sys.executable, "-m", "benchmarks.unlike_load", self._server.url, str(self._model), kind]
            tenant = subprocess.Popen(
                dies_with_parent(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
            )
            self._stack.callback(tenant.wait)
            self._stack.callback(tenant.terminate)
            self._tenants[kind] = tenant
        for kind in KINDS:
            self._steps(kind)
            self.run([kind], 0.0)

    def run(self, kinds: list[str], seconds: float) -> dict[str, Steps]:
        """The steps of these tenants at the same time."""
        for kind in kinds:
            stdin = self._tenants[kind].stdin
            assert stdin is not None
            stdin.write(f"{seconds}\n")
            stdin.flush()
        return {kind: self._steps(kind) for kind in kinds}

    def _steps(self, kind: str) -> Steps:
        stdout = self._tenants[kind].stdout
        assert stdout is not None
        if not (line := stdout.readline()):
            raise RuntimeError(f"the tenant {kind} has ended")
        return json.loads(line)

    def round(self, alone_s: float, together_s: float) -> dict[str, Any]:
        alone: dict[str, Steps] = {}
        for kind in KINDS:
            alone |= self.run([kind], alone_s)
            print(f"{self.name}, {kind} alone: {[round(seconds(step), 2) for step in alone[kind]]} s", flush=True)
        before, lags, over = self._cpu(), list[float](), threading.Event()
        watch = threading.Thread(target=self._watch, args=(lags, over))
        watch.start()
        try:
            together = self.run(list(KINDS), together_s)
        finally:
            over.set()
            watch.join()
        cpu = {part: seconds - before[part] for part, seconds in self._cpu().items()}
        return {"alone": alone, "together": together, "lags_s": lags, "cpu_s": cpu}

    def _watch(self, lags: list[float], over: threading.Event) -> None:
        with httpx.Client(base_url=self._server.url, trust_env=False, timeout=60.0) as client:
            while not over.wait(0.05):
                began = time.perf_counter()
                client.get("/api/v1/healthz").raise_for_status()
                lags.append(time.perf_counter() - began)

    def _cpu(self) -> dict[str, float]:
        return {part: sum(map(cpu_seconds, pids)) for part, pids in computing_of(self._server.pid).items()}


def seconds(step: dict[str, float]) -> float:
    return sum(step[part] for part in PARTS)


def _rows(rounds: dict[str, list[dict[str, Any]]]) -> list[Row]:
    """Medians of all rounds. `direct` is the time alone; of the event loop the other build's."""
    rows: list[Row] = []
    for side, found in rounds.items():
        steps = {
            way: {kind: [step for each in found for step in each[way][kind]] for kind in KINDS}
            for way in ("alone", "together")
        }
        alone = {kind: statistics.median(map(seconds, steps["alone"][kind])) for kind in KINDS}
        for kind in KINDS:
            others = [step for other in KINDS if other != kind for step in steps["alone"][other]]
            longest = max(step[part] for step in others for part in PARTS)
            bound = Target(len(KINDS) * alone[kind] + longest)
            taken = [seconds(step) for step in steps["together"][kind]]
            note = f"{len(taken)} steps; pass {longest:.2f} s; longest step {max(taken):.2f} s"
            what = f"{side}: {kind}, a step"
            rows.append(Row("unlike", what, "s", statistics.median(taken), bound, alone[kind], note=note))
            for part in PARTS:
                values = [[step[part] for step in steps[way][kind]] for way in ("together", "alone")]
                if max(values[0]) > 0:
                    medians = [statistics.median(each) for each in values]
                    name = part.removesuffix("_s")
                    rows.append(Row("unlike", f"{side}: {kind}, {name}", "s", medians[0], None, medians[1]))
        lags = [lag for each in found for lag in each["lags_s"]]
        note = ", ".join(f"{part} {sum(each['cpu_s'][part] for each in found):.1f}" for part in found[0]["cpu_s"])
        for name, share in (("p50", 0.5), ("p99", 0.99), ("max", 1.0)):
            what = f"{side}: {name} of a GET beside all"
            rows.append(Row("unlike", what, "ms", 1e3 * quantile(lags, share), note=f"CPU s together: {note}"))
    return rows


def _model(directory: Path) -> Path:
    """The tiny model that sees, with the template for tools and a longer context."""
    directory.mkdir()
    vision.make(directory)
    (directory / "chat_template.jinja").write_text(tools.CHAT_TEMPLATE.replace(*SHOWN))
    config = json.loads((directory / "config.json").read_text())
    config["text_config"]["max_position_embeddings"] = CONTEXT
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    settings = json.loads((directory / "tokenizer_config.json").read_text()) | {"model_max_length": CONTEXT}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
    return directory


def _arguments() -> argparse.Namespace:
    parser = program.parser("unlike_tenants", __doc__)
    parser.add_argument("--quick", action="store_true", help="short windows")
    parser.add_argument("--against", metavar="COMMIT", help="take turns with a server of this commit")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--alone", type=float, default=5.0, help="seconds of each tenant alone")
    parser.add_argument("--together", type=float, default=30.0, help="seconds of all together")
    parser.add_argument("--out", type=Path, default=Path("out/bench/unlike-tenants.json"))
    return parser.parse_args()


def main() -> None:
    options = _arguments()
    alone_s, together_s = (2.0, 15.0) if options.quick else (options.alone, options.together)
    with ExitStack() as stack:
        model = _model(Path(stack.enter_context(TemporaryDirectory(prefix="skyrl-unlike-"))) / "model")
        sides = [Side("now", ROOT, model, stack)]
        if options.against:
            other = Path(stack.enter_context(TemporaryDirectory(prefix="skyrl-before-")))
            sides.append(Side("before", program.taken_out(options.against, other), model, stack))
        for side in sides:
            side.begin()
        rounds: dict[str, list[dict[str, Any]]] = {side.name: [] for side in sides}
        for number in range(options.rounds):
            for side in sides if number % 2 == 0 else sides[::-1]:
                rounds[side.name].append(side.round(alone_s, together_s))
    print(text_table(_rows(rounds)))
    program.write(options.out, {"facts": facts(), "rounds": rounds})


if __name__ == "__main__":
    main()
