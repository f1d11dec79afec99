"""Seconds from an optimizer step to the first token of the new weights, through the SDK and a whole server.

    python -m benchmarks.hand_over [--model DIRECTORY] [--rank 32] [--against COMMIT] [--in-flight 0 32] [--rounds 16]

A round trains one step on one short sequence, saves the weights (`save_weights_and_get_sampling_client`), samples one
token of the new version, and one more of the same version: what the second takes is what no hand-over could do without,
and `beyond` is the rest. The export's part is that of a step on EXPORT_TOKENS tokens: seconds of the save before vLLM
is asked to load, by seconds of passes and step, as the server counts them.
Beside it, as many samples as `--in-flight` says are kept in flight by another process, from an adapter that was saved
before. With `--against` a server of that commit takes turns with this one. CPU seconds are those of all processes
of the server from the step's end to the first token, without load in flight.

Knows the SDK and the processes of a server. Checks that each version's token has the logprob of its own weights: the
training pass that follows scores the same token.
"""

from __future__ import annotations

import argparse
import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import tinker
from tinker import types

from benchmarks import program
from benchmarks.machine import ROOT
from benchmarks.processes import cpu_seconds
from benchmarks.series import quantile
from benchmarks.table import Row, Target, text_table
from skyrl.base.tiny import model_path
from skyrl.cli.demo.rl import datum
from skyrl.cli.demo.server import DemoServer

P50, P99 = 0.2, 0.25
"""The parts of the other build's quantiles that the hand-over may take."""
EXPORT_TOKENS, EXPORT_PART = 512, 5.0
"""Tokens of a step, and the percentage of it that an export may take."""
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12]
LOAD_TOKENS = 64
READY_S = 300.0
TURN, UNCOUNTED = 8, 2
"""Rounds of a side before the other one's, after those in which caches get warm."""


@dataclass(frozen=True)
class Round:
    """Seconds: the save until the SDK has a sampling client, the first token of it, the next token; CPU seconds."""

    save_s: float
    first_s: float
    again_s: float
    step_s: float
    cpu_s: float

    @property
    def hand_over_s(self) -> float:
        return self.save_s + self.first_s

    @property
    def beyond_s(self) -> float:
        return self.hand_over_s - self.again_s


class Side:
    """A server of one build with a model in training."""

    def __init__(self, name: str, root: Path, options: argparse.Namespace, stack: ExitStack) -> None:
        self.name = name
        self._options = options
        self._state = state = Path(stack.enter_context(TemporaryDirectory(prefix="skyrl-hand-over-")))
        engine = {"generator.inference_engine.max_model_len": 512, "trainer.policy.model.lora.max_lora_rank": 32}
        flags = ("--base-model", str(options.model), *(("--ray-address", "local") if options.remote else ()))
        environment = os.environ | {"PYTHONPATH": str(root)}
        self.server = DemoServer(state, *flags, backend_config=engine, cwd=root, environment=environment)
        self.server.start()
        stack.callback(self.server.stop)

    def connect(self, stack: ExitStack) -> None:
        self.server.wait_ready(READY_S)
        service = stack.enter_context(tinker.ServiceClient(base_url=self.server.url, api_key="tml-hand-over"))
        self._trainer = service.create_lora_training_client(
            base_model=str(self._options.model), rank=self._options.rank, seed=1
        ).result()
        self._sampled: tuple[int, float] | None = None

    def round(self) -> Round:
        data = [datum(PROMPT, [PROMPT[0]], [-1.0], 1.0)]
        began = time.perf_counter()
        self._trainer.forward_backward(data, "importance_sampling").result()
        self._trainer.optim_step(types.AdamParams(learning_rate=1e-3)).result()
        cpu, marks = self._cpu(), [time.perf_counter()]
        sampler = self._trainer.save_weights_and_get_sampling_client().result()
        marks.append(time.perf_counter())
        first = self._token(sampler)
        marks.append(time.perf_counter())
        spent = self._cpu() - cpu
        self._token(sampler)
        end = time.perf_counter()
        self._check(*first)
        return Round(marks[1] - marks[0], marks[2] - marks[1], end - marks[2], marks[0] - began, spent)

    def export_percent(self) -> float | None:
        """None for a build that does not count it."""
        tokens = [5 + number % 64 for number in range(EXPORT_TOKENS // 2)]
        data = [datum(PROMPT, tokens, [-1.0] * len(tokens), 1.0)] * 2
        self._trainer.forward_backward(data, "importance_sampling").result()
        self._trainer.save_weights_and_get_sampling_client().result()  # counts with the step that is open
        self._trainer.optim_step(types.AdamParams(learning_rate=0.0)).result()
        with closing(sqlite3.connect(f"file:{self._state}/skyrl.db?mode=ro", uri=True)) as database:
            try:
                newest = "SELECT save_s, busy_s FROM run_steps ORDER BY step DESC LIMIT 1"
                save_s, busy_s = database.execute(newest).fetchone()
            except sqlite3.OperationalError:
                return None
        return 100 * save_s / busy_s

    def _token(self, sampler: tinker.SamplingClient) -> tuple[int, float]:
        prompt = types.ModelInput.from_ints(PROMPT)
        sampled = sampler.sample(prompt, 1, types.SamplingParams(max_tokens=1)).result().sequences[0]
        assert sampled.logprobs is not None
        return sampled.tokens[0], sampled.logprobs[0]

    def _check(self, token: int, logprob: float) -> None:
        """Raise unless the trainer's weights give the token this logprob: the sample is of the version just saved."""
        scored = self._trainer.forward([datum(PROMPT, [token], [logprob], 0.0)], "importance_sampling").result()
        own = scored.loss_fn_outputs[0]["logprobs"].tolist()[-1]
        if abs(own - logprob) > 0.05:
            raise RuntimeError(f"{self.name}: the sample has logprob {logprob}, and the trained weights give {own}")

    def _cpu(self) -> float:
        processes = [self.server.pid, *(each.pid for each in psutil.Process(self.server.pid).children(recursive=True))]
        return sum(map(cpu_seconds, processes))

    @contextmanager
    def loaded(self, in_flight: int) -> Generator[None]:
        """So many samples are in flight within the block."""
        if not in_flight:
            yield
            return
        command = [sys.executable, "-m", "benchmarks.hand_over_load", self.server.url, str(self._options.model)]
        command += [str(in_flight), str(LOAD_TOKENS)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT)
        assert process.stdin
        assert process.stdout
        try:
            process.stdout.readline()  # all are in flight
            yield
        finally:
            process.stdin.close()
            process.wait()


def _arguments() -> argparse.Namespace:
    parser = program.parser("hand_over", __doc__)
    parser.add_argument("--model", type=Path, default=model_path(), help="directory of a model")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--remote", action="store_true", help="vLLM on a Ray node, here on this machine")
    parser.add_argument("--against", metavar="COMMIT", help="take turns with a server of this commit")
    parser.add_argument("--in-flight", type=int, nargs="+", default=[0, 32])
    parser.add_argument("--rounds", type=int, default=16, help="of each side, for each number in flight")
    parser.add_argument("--quick", action="store_true", help="a quarter of the rounds")
    parser.add_argument("--out", type=Path, default=Path("out/bench/hand-over.json"))
    return parser.parse_args()


def _measured(sides: list[Side], in_flight: int, options: argparse.Namespace) -> dict[str, list[Round]]:
    """The rounds of each side. Of two sides the one that begins alternates."""
    found: dict[str, list[Round]] = {side.name: [] for side in sides}
    rounds = options.rounds // 4 if options.quick else options.rounds
    for number, first in enumerate(range(0, rounds, TURN)):
        for side in sides if number % 2 == 0 else sides[::-1]:
            with side.loaded(in_flight):
                rest = min(TURN, rounds - first) + UNCOUNTED
                found[side.name] += [side.round() for _ in range(rest)][UNCOUNTED:]
    return found


_AIMS = [(field, q, part) for field in ("hand_over_s", "beyond_s") for q, part in ((0.5, P50), (0.99, P99))]


def _rows(found: dict[str, list[Round]], in_flight: int) -> list[Row]:
    def of(name: str, field: str, q: float) -> float | None:
        return quantile([getattr(each, field) * 1e3 for each in found[name]], q) if name in found else None

    rows = []
    parts = [(f"{name}_s", 0.5, None) for name in ("save", "first", "again", "step", "cpu")]
    for field, q, share in (*_AIMS, *parts):
        before = of("before", field, q)
        target = Target(share * before) if share and before is not None else None
        what = f"{in_flight} in flight: {field.removesuffix('_s').replace('_', ' ')} p{q * 100:.0f}"
        rows.append(Row("hand-over", what, "ms", of("now", field, q) or 0.0, target, before))
    return rows


def main() -> None:
    options = _arguments()
    options.model = options.model.resolve()
    rows: list[Row] = []
    raw: dict[str, Any] = {}
    with ExitStack() as stack:
        sides = [Side("now", ROOT, options, stack)]
        if options.against:
            other = Path(stack.enter_context(TemporaryDirectory(prefix="skyrl-before-")))
            sides.append(Side("before", program.taken_out(options.against, other), options, stack))
        for side in sides:
            side.connect(stack)
        for in_flight in options.in_flight:
            found = _measured(sides, in_flight, options)
            rows += _rows(found, in_flight)
            raw[str(in_flight)] = {name: [asdict(each) for each in rounds] for name, rounds in found.items()}
        exported = {side.name: side.export_percent() for side in sides}
    rows.append(
        Row(
            "hand-over",
            f"export of a step on {EXPORT_TOKENS} tokens",
            "%",
            exported["now"] or 0.0,
            Target(EXPORT_PART),
            exported.get("before"),
        )
    )
    print("\n" + text_table(rows))
    program.write(options.out, raw)


if __name__ == "__main__":
    main()
