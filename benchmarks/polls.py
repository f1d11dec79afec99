"""8,192 waiting polls beside heartbeats of 1,000 sessions, 50 samples/s and training, on this build and another one.

    python -m benchmarks.polls [--against COMMIT] [--polls 8192] [--quick] [--out FILE]

Each build has a server with an engine (tiny model), in front of the null upstream. `polls_load` is all clients but the
trainer, which is the real SDK in this process: a pair of forward_backward and optim_step each second. The phases:
nobody polls; all samples are submitted; their polls come, and wait until each was renewed; every connection of a poll
breaks at once and nobody can connect for two seconds, as when a proxy restarts; the API process is killed; the
upstream answers all samples at once. The other build goes through all of them first: on a busy machine compare CPU."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import tinker

from benchmarks import program
from benchmarks.polls_clients import PollSpec
from benchmarks.series import quantile
from benchmarks.stage import NullUpstream, trainer
from benchmarks.table import Row, Target, text_table
from benchmarks.training import ADAM
from skyrl.cli.demo.run import stream_data

HEARTBEAT_MS = 20
KB_PER_POLL = 20
PAIR_EVERY_S = 1.0
Phases = dict[str, dict[str, Any]]


class Training:
    """Trains with the real SDK until `with` ends; `spent_s` has the seconds of each pair, `errors` what failed."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.spent_s: list[float] = []
        self.errors: list[str] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Training:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        data = stream_data(1, 8)
        with tinker.ServiceClient(base_url=self._url, api_key="tml-bench") as client:
            model = client.create_lora_training_client(base_model="tiny", rank=8).result()
            while not self._stop.wait(PAIR_EVERY_S):
                began = time.perf_counter()
                try:
                    training_pass, step = model.forward_backward(data, "cross_entropy"), model.optim_step(ADAM)
                    training_pass.result()
                    step.result()
                except (tinker.TinkerError, ValueError) as error:
                    self.errors.append(str(error)[-300:])
                    return
                self.spent_s.append(time.perf_counter() - began)


def measure(root: Path, options: Any) -> Phases:
    """What `polls_load` prints, by phase; and "training"."""
    with (
        NullUpstream() as upstream,
        trainer(upstream, root=root, threads=1) as server,
        Training(server.url) as training,
    ):
        spec = PollSpec(server.url, upstream.url, server.pid, options.polls, quick=options.quick)
        command = [sys.executable, "-m", "benchmarks.polls_load", json.dumps(asdict(spec))]
        found: Phases = {}
        with subprocess.Popen(command, stdout=subprocess.PIPE) as load:
            assert load.stdout
            for line in load.stdout:
                phase = json.loads(line)
                found[phase["phase"]] = phase
                print(f"  {line.decode().strip()}", flush=True)
        if load.returncode:
            raise RuntimeError(f"the load ended with {load.returncode}")
    found["training"] = {"pairs": len(training.spent_s), "errors": training.errors}
    found["training"] |= {"p50_ms": quantile(training.spent_s, 0.5) * 1e3, "max_ms": max(training.spent_s) * 1e3}
    print(f"  training {found['training']}")
    return found


def _refused(phase: dict[str, Any]) -> int:
    """Errors, polls that the server answered with 500 and above, which the SDK repeats at once, and lost samples."""
    server_errors = sum(n for status, n in phase["polls"].items() if status[0] == "5")
    return sum(phase["errors"].values()) + server_errors + phase.get("lost", 0)


def _renewal_ms(found: Phases) -> float:
    """CPU of the API for one renewed poll, beside that of everything else; NaN if none was renewed."""
    waiting, alone = found["waiting"], found["no polls"]["api_cores"]
    if not (renewed := waiting["polls"].get("408", 0)):
        return float("nan")
    return (waiting["api_cores"] - alone) * waiting["seconds"] / renewed * 1e3


def rows(now: Phases, before: Phases | None) -> list[Row]:
    """`direct` is the other build."""

    def row(phase: str, what: str, unit: str, key: str, target: Target | None = None) -> Row:
        found = now[phase]
        note = f"polls {found['polls']}, generator {found['generator_cores']:.2f} cores, API {found['api_cores']:.2f}"
        note += f", generator late p99 {found['late_p99_ms']:.1f} ms"
        direct = None if before is None else before[phase][key]
        return Row("polls", what, unit, found[key], target, direct, _refused(found), note)

    table = [row("waiting", "memory of a waiting poll", "kB", "kb_per_poll", Target(KB_PER_POLL))]
    for phase in ("no polls", "settle", "waiting", "broken", "killed", "answered"):
        target = Target(HEARTBEAT_MS) if phase == "waiting" else None
        table.append(row(phase, f"heartbeat p50, {phase}", "ms", "beat_p50_ms"))
        table.append(row(phase, f"heartbeat p99, {phase}", "ms", "beat_p99_ms", target))
    table.append(row("answered", "until all are answered", "s", "answered_s"))
    other = None if before is None else _renewal_ms(before)
    return [*table, Row("polls", "API CPU of a renewed poll", "ms", _renewal_ms(now), None, other)]


def main() -> None:
    quick = "short phases: no poll is renewed"
    parser = program.parser("polls", __doc__, out="bench/polls.json", quick=quick, against=True)
    parser.add_argument("--polls", type=int, default=8192)
    options = parser.parse_args()
    found: dict[str, Phases] = {}
    with ExitStack() as stack:
        for name, root in reversed(program.builds(options.against, stack).items()):
            print(f"{name}:")
            found[name] = measure(root, options)
    print("\n" + text_table(rows(found["now"], found.get("before"))))
    program.write(options.out, found)


if __name__ == "__main__":
    main()
