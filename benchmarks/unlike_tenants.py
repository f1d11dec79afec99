"""Tenants who differ on one server: how long a step of each takes alone, and beside the others.

    python -m benchmarks.unlike_tenants [--quick] [--against COMMIT] [--minutes 4.8] [--out FILE]

A real `skyrl serve` with the tiny model that sees and real vLLM; four tenants (`benchmarks/unlike_load.py`): one with
prompts of 10,000 tokens, one with pictures, one with agents that must call one of 300 tools in each turn, one with tiny
steps of RL. Each works alone, then all work at once, until each has made a step. The bound of a step is its share, the
number of tenants times its time alone, and one pass: the longest one of another tenant alone. The bound of its pass is
the number of tenants that train times the pass alone, and the same pass. Each step beside the others must be within,
also one that has not ended. Alone the first step is not counted if there is another one.

"overtaken" is the order of the passes, which does not depend on the machine: while a pass of the tenant waited or ran,
so many others that had arrived later ended. While all work, a GET every 50 ms shows how long the API's event loop lets
a request wait. With `--against` a server of that commit follows. After so many minutes the program ends with what it
has measured.
"""

from __future__ import annotations

import json
import multiprocessing
import sqlite3
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx

from benchmarks import program
from benchmarks.machine import facts
from benchmarks.processes import computing_of, cpu_seconds
from benchmarks.series import quantile
from benchmarks.stage import server_of
from benchmarks.table import Row, Target, text_table
from benchmarks.unlike_load import KINDS, MODEL, Step, work
from skyrl.api.access import tenant_of_key
from skyrl.base.tiny import tools, vision
from skyrl.cli.demo.server import DemoServer, ServerFailed

CONTEXT = 24_576
ENGINE = {"generator.inference_engine.max_model_len": CONTEXT, "trainer.policy.model.lora.max_lora_rank": 8}
SHOWN = ("tool | tojson", "tool.function.name + ': ' + tool.function.description")
"""The tiny tokenizer makes 130 tokens of a tool's JSON, others some 40: so 300 tools have 10,000 tokens."""
ENDING_S = 15.0
"""After the last minute, for what hangs."""
PARTS = ("save", "sample", "pass", "optim")
TRAIN = [kind for kind, rl in KINDS.items() if rl is not None]
PASSES = "SELECT tenant, created_at, completed_at FROM futures WHERE kind = 'FORWARD_BACKWARD' AND created_at > ?"


class TimeIsUp(Exception):
    pass


@dataclass
class Worked:
    """Tenants at the same time: their steps, the seconds so far of steps that had not ended, the CPU seconds of vLLM
    and trainer, milliseconds of GETs, and by tenant the most later passes that ended before one of its own."""

    steps: dict[str, list[Step]]
    unended_s: dict[str, float] = field(default_factory=dict)
    cpu_s: dict[str, float] = field(default_factory=dict)
    lags_ms: list[float] = field(default_factory=list)
    overtaken: dict[str, int] = field(default_factory=dict)

    def counted(self, kind: str) -> list[Step]:
        return self.steps[kind][1:] or self.steps[kind]


class Side:
    """A server of one build, and its tenants."""

    def __init__(self, server: DemoServer, model: Path, ends_at: float, stack: ExitStack) -> None:
        self._server, self._ends_at = server, ends_at
        self._tenants: dict[Connection, str] = {}
        server.wait_ready(ends_at - time.monotonic())
        context = multiprocessing.get_context("forkserver")  # which imports the SDK once
        context.set_forkserver_preload(["benchmarks.unlike_load"])
        for kind in KINDS:
            ours, theirs = context.Pipe()
            tenant = context.Process(target=work, args=(theirs, server.url, str(model), kind), daemon=True)
            tenant.start()
            stack.callback(tenant.kill)
            theirs.close()
            self._tenants[ours] = kind
        self._drain(self._tenants)

    def run(self, kinds: Sequence[str], is_enough: Callable[[Worked], bool]) -> Worked:
        """Let these tenants work until it is enough, or until the time is up."""
        worked, before = Worked({kind: [] for kind in kinds}), self._cpu()
        tenants = {told: kind for told, kind in self._tenants.items() if kind in kinds}
        began = dict.fromkeys(kinds, time.monotonic())
        for told in tenants:
            told.send("go")
        while not is_enough(worked) and time.monotonic() < self._ends_at:
            for told in wait([*tenants], 0.05):
                assert isinstance(told, Connection)
                worked.steps[tenants[told]].append(told.recv())
                began[tenants[told]] = time.monotonic()
        worked.unended_s = {kind: time.monotonic() - at for kind, at in began.items()}
        worked.cpu_s = {part: seconds - before[part] for part, seconds in self._cpu().items()}
        for told in tenants:
            told.send("stop")
        return worked

    def alone(self, kind: str, seconds: float) -> Worked:
        until, steps = time.monotonic() + seconds, 1 if kind == "long" else 3
        worked = self.run([kind], lambda worked: len(worked.steps[kind]) >= steps and time.monotonic() >= until)
        self._drain([told for told, each in self._tenants.items() if each == kind])
        return worked

    def together(self, seconds: float) -> Worked:
        """Until each has made a step, and for so many seconds."""
        until, since, lags, over = time.monotonic() + seconds, time.time(), list[float](), threading.Event()
        watch = threading.Thread(target=self._watch, args=(lags, over))
        watch.start()
        try:
            worked = self.run([*KINDS], lambda worked: all(worked.steps.values()) and time.monotonic() >= until)
        finally:
            over.set()
            watch.join()
        worked.lags_ms, worked.overtaken = lags, self._overtaken(since)
        return worked

    def _drain(self, tenants: Collection[Connection]) -> None:
        """Wait until they have ended the steps that run."""
        for told in tenants:
            while told.poll(max(0.0, self._ends_at - time.monotonic())):
                if told.recv() is None:
                    break
            else:
                raise TimeIsUp

    def _watch(self, lags: list[float], over: threading.Event) -> None:
        with httpx.Client(base_url=self._server.url, trust_env=False, timeout=60.0) as client:
            while not over.wait(0.05):
                began = time.perf_counter()
                client.get("/api/v1/healthz").raise_for_status()
                lags.append(1e3 * (time.perf_counter() - began))

    def _cpu(self) -> dict[str, float]:
        return {part: sum(map(cpu_seconds, pids)) for part, pids in computing_of(self._server.pid).items()}

    def _overtaken(self, since: float) -> dict[str, int]:
        """By tenant, how many passes of others at most arrived after one of its passes and ended before it."""
        with closing(sqlite3.connect(self._server.state_dir / "skyrl.db")) as connection:
            passes = connection.execute(PASSES, (since,)).fetchall()
        found: dict[str, int] = {}
        for kind in TRAIN:
            own = [each for each in passes if each[0] == tenant_of_key(f"tml-{kind}")]
            others = [(began, ended) for tenant, began, ended in passes if tenant != own[0][0] and ended] if own else []
            counts = [sum(b > began and (not end or e < end) for b, e in others) for _, began, end in own]
            found[kind] = max(counts, default=0)
        return found


def rows_of(side: str, found: Mapping[str, Worked]) -> list[Row]:
    """The longest step and pass of each tenant beside the others. `direct` is the median alone."""
    rows, beside = list[Row](), found["all"]
    for kind, steps in beside.steps.items():
        alone = found[kind].counted(kind)
        one_pass = max(step.pass_s for other in KINDS if other != kind for step in found[other].steps[other])
        seconds, unended_s = [step.seconds for step in steps], beside.unended_s[kind]
        own = statistics.median(step.seconds for step in alone)
        note = f"{len(KINDS)} × {own:.2f} + {one_pass:.2f} s; {_parts(steps)}"
        note += f"; the last one had run for {unended_s:.2f} s; CPU s of a step alone: "
        note += ", ".join(
            f"{part} {spent / len(found[kind].steps[kind]):.2f}" for part, spent in found[kind].cpu_s.items()
        )
        bound, what = Target(len(KINDS) * own + one_pass), f"{side}: {kind}, longest step"
        rows.append(Row("unlike", what, "s", max([*seconds, unended_s]), bound, own, note=note))
        if kind in TRAIN:
            own, passes = statistics.median(step.pass_s for step in alone), [step.pass_s for step in steps]
            note = f"{len(TRAIN)} × {own:.2f} + {one_pass:.2f} s; overtaken by {beside.overtaken[kind]} passes"
            bound, what = Target(len(TRAIN) * own + one_pass), f"{side}: {kind}, longest ended pass"
            rows.append(Row("unlike", what, "s", quantile(passes, 1.0), bound, own, note=note))
    note = "CPU s of all together: " + ", ".join(f"{part} {spent:.1f}" for part, spent in beside.cpu_s.items())
    for name, share in (("p50", 0.5), ("p99", 0.99), ("max", 1.0)):
        what = f"{side}: {name} of a GET beside all"
        rows.append(Row("unlike", what, "ms", quantile(beside.lags_ms, share), note=note if share == 1.0 else ""))
    return rows


def _parts(steps: Sequence[Step]) -> str:
    """How many steps, and the medians of their parts."""
    medians = (f"{part} {quantile([getattr(step, f'{part}_s') for step in steps], 0.5):.2f}" for part in PARTS)
    return f"{len(steps)} steps, medians: {', '.join(medians)}"


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


def measure(side: str, tenants: Side, quick: bool) -> Iterator[tuple[str, Worked]]:
    """What the tenants do, each alone, and "all" of them at once: as much as there is time for."""
    for kind in KINDS:
        yield kind, (worked := tenants.alone(kind, 0.0 if quick else 5.0))
        print(f"{side}, {kind} alone: {[round(step.seconds, 2) for step in worked.steps[kind]]} s", flush=True)
    yield "all", tenants.together(10.0 if quick else 45.0)


def main() -> None:
    parser = program.parser("unlike_tenants", __doc__, out="bench/unlike-tenants.json", quick="short", against=True)
    parser.add_argument("--minutes", type=float, default=4.8, help="end after so many, with what was measured")
    options = parser.parse_args()
    began, found, rows = time.monotonic(), defaultdict[str, dict[str, Worked]](dict), list[Row]()
    with program.ended_after(60 * options.minutes + ENDING_S), ExitStack() as stack:
        model = _model(Path(stack.enter_context(TemporaryDirectory(prefix="skyrl-unlike-"))) / "model")
        flags = ("--base-model", str(model), "--served-model-name", MODEL)
        roots = program.builds(options.against, stack)
        for number, (side, root) in enumerate(roots.items(), 1):
            ends_at = began + 60 * options.minutes * number / len(roots)
            with ExitStack() as of_side, suppress(TimeIsUp, ServerFailed):
                tenants = Side(server_of(of_side, *flags, root=root, engine=ENGINE), model, ends_at, of_side)
                found[side].update(measure(side, tenants, options.quick))
            if "all" in found[side]:
                rows += rows_of(side, found[side])
            else:
                print(f"{side}: not all measured together: the time was up after {len(found[side])} alone", flush=True)
    print(text_table(rows))
    raw = {side: {name: asdict(each) for name, each in worked.items()} for side, worked in found.items()}
    program.write(options.out, {"facts": facts(), "found": raw})


if __name__ == "__main__":
    main()
