"""Compares training with plain PEFT loops: the backend without a server, the same through a whole server, a padded loop
over PEFT, and a packed one. In turns, each in a process of its own.

Usage: python -m benchmarks.trainer [--models tiny 0.6b] [--rows ROW ...] [--ways WAY ...] [--server] [--rounds N]
                                    [--threads N] [--clock cpu] [--quick] [--against COMMIT] [--out FILE]

A row is a batch; a step is its forward_backward and optim_step, from arrays to results. On a CPU everything is float32;
on CUDA, where there is one, bfloat16 with float32 adapters. 0.6b has random weights in Qwen3-0.6B's shape, quarter 7 of
its 28 layers; hybrid and large-hybrid have three layers of Qwen3.5's delta rule and one of
attention. On a CPU 0.6b trains smaller batches of the same kinds. With `--against`, "before" is the way `skyrl` of
that commit, and a column has its time over that of each way.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks import machine, program
from benchmarks.models import make_hybrid, make_large, make_large_hybrid, make_long_tiny, make_quarter
from benchmarks.table import aligned, number
from benchmarks.trainer_flops import computed_flops, model_flops, peak_flops
from benchmarks.trainer_process import Step, WayProcess
from benchmarks.trainer_rows import EVEN, FULL, LONG, OF_GPU, SMALL, BatchRow, TenantPass, rows_of, tokens_of
from benchmarks.trainer_ways import PeftWay, SkyrlWay, Way, gaps


def _server_way(model: str, threads: int, *, merge: bool) -> Way:
    from benchmarks.trainer_server import ServerWay  # needs the Tinker SDK, which the other ways do not

    return ServerWay(model, threads, merge=merge)


MODELS = {
    "tiny": make_long_tiny,
    "quarter": make_quarter,
    "0.6b": make_large,
    "hybrid": make_hybrid,
    "large-hybrid": make_large_hybrid,
}
BASELINE = "peft"
BEFORE = "before"
WAYS: dict[str, Callable[..., Way]] = {
    "peft": functools.partial(PeftWay, packed=False),
    "peft-packed": functools.partial(PeftWay, packed=True),
    "skyrl": functools.partial(SkyrlWay, merge=False),
    "skyrl-merged": functools.partial(SkyrlWay, merge=True),
    "skyrl-whole": functools.partial(SkyrlWay, merge=False, whole=True),
    "skyrl-recomputed": functools.partial(SkyrlWay, merge=False, config={"trainer.gradient_checkpointing": True}),
    "server": functools.partial(_server_way, merge=False),
    "server-merged": functools.partial(_server_way, merge=True),
}
MERGED = ("skyrl-merged", "server-merged")
"""Only for rows with several passes."""
OF_SERVER = ("server", "server-merged")
NOT_BY_DEFAULT = ("skyrl-whole", "skyrl-recomputed", *OF_SERVER)
COLUMNS = (
    "model, batch, way",
    "tokens/s",
    "÷ peft",
    "÷ before",
    "peak MiB",
    "max |loss − peft's|",
    "max |logprob − peft's|",
)
MFU = ("MFU of all tokens", "MFU of computed rows")
ROUND_S = 0.3
"""A way's turn in a round is one step, or as many as the slowest way makes in this time."""
Result = dict[str, Any]


def measure(
    model: str,
    row: BatchRow,
    ways: Sequence[str],
    rounds: int,
    threads: int,
    clock: str,
    before: Path | None = None,
) -> list[Result]:
    """One result for each way. The first way of a round is another one in each round. before: the checkout that the way
    of this name measures."""
    vocabulary = json.loads((Path(model) / "config.json").read_text())["vocab_size"]
    draw = functools.partial(row.passes, vocabulary)
    processes: dict[str, WayProcess] = {}
    try:
        for way in ways:
            make = functools.partial(WAYS["skyrl" if way == BEFORE else way], model, threads)
            root = before if way == BEFORE else None
            processes[way] = WayProcess(make, draw, redrawn=row.redrawn, root=root)
        steps: dict[str, list[Step]] = {way: [] for way in ways}
        repeats = min(process.call("steps_within", ROUND_S) for process in processes.values())
        for process in processes.values():
            process.call("watch_memory")
        for round_ in range(rounds):
            first = round_ % len(ways)
            for way in [*ways[first:], *ways[:first]]:
                steps[way].append(processes[way].call("step", repeats))
        peaks = {way: process.call("peak_mb") for way, process in processes.items()}
    finally:
        for process in processes.values():
            process.close()
    last = draw(steps[ways[0]][-1].number)
    return results(model, row, last, steps, peaks, clock)


def results(
    model: str,
    row: BatchRow,
    last: Sequence[TenantPass],
    steps: dict[str, list[Step]],
    peaks: dict[str, float | None],
    clock: str,
) -> list[Result]:
    """The figures of each way. `last`: the passes of the last step. Ratios are medians over rounds; without the
    baseline there are none, and no gaps."""
    seconds = {way: [getattr(step, f"{clock}_s") for step in of_way] for way, of_way in steps.items()}
    device_flops = peak_flops()
    found: list[Result] = []
    for way, of_way in steps.items():
        rates = [step.tokens / taken for step, taken in zip(of_way, seconds[way], strict=True)]
        tokens, rows = (statistics.mean(getattr(step, name) for step in of_way) for name in ("tokens", "rows"))
        result: Result = {
            "batch": row.name,
            "what": row.what,
            "way": way,
            "tokens": tokens,
            "rows": rows,
            "wall_s": [step.wall_s for step in of_way],
            "cpu_s": [step.cpu_s for step in of_way],
            "tokens_per_s": statistics.median(rates),
            "peak_mib": peaks[way],
        }
        if BASELINE in steps:
            pairs = zip(seconds[BASELINE], seconds[way], strict=True)
            result["ratio"] = statistics.median(theirs / ours for theirs, ours in pairs)
            of_loss, of_logprobs = gaps(of_way[-1].trained, steps[BASELINE][-1].trained, last)
            result |= {"loss_gap": of_loss, "logprob_gap": of_logprobs}
        if BEFORE in steps:
            pairs = zip(seconds[BEFORE], seconds[way], strict=True)
            result["ratio_to_before"] = statistics.median(theirs / ours for theirs, ours in pairs)
        if device_flops is not None:
            steps_per_s = result["tokens_per_s"] / tokens_of(last)
            result["mfu"] = model_flops(model, last) * steps_per_s / device_flops
            of_last = rows / tokens * tokens_of(last)
            result["mfu_of_rows"] = computed_flops(model, last, of_last) * steps_per_s / device_flops
        found.append(result)
    return found


def table(by_model: dict[str, list[Result]]) -> str:
    """A line for each batch, and one for each way below it."""
    with_mfu = any("mfu" in result for found in by_model.values() for result in found)
    lines = [[*COLUMNS, *(MFU if with_mfu else [])]]
    for model, found in by_model.items():
        batch = None
        for result in found:
            if result["batch"] != batch:
                batch = result["batch"]
                said = f"{model}, {batch}: {result['what']} ({result['tokens']:,.0f} tokens)"
                lines.append([said, *[""] * (len(lines[0]) - 1)])
            line = [f"  {result['way']}", number(result["tokens_per_s"])]
            line += [number(result.get("ratio")), number(result.get("ratio_to_before"))]
            line += [number(result["peak_mib"]), *(_gap(result.get(name)) for name in ("loss_gap", "logprob_gap"))]
            lines.append([*line, *([number(result[name]) for name in ("mfu", "mfu_of_rows")] if with_mfu else [])])
    return aligned(lines)


def _gap(value: float | None) -> str:
    return "" if value is None else f"{value:.1g}"


def _arguments() -> argparse.Namespace:
    names = list(dict.fromkeys(row.name for row in (*FULL, *LONG, *OF_GPU, *EVEN, *SMALL)))
    parser = program.parser("trainer", __doc__, out="trainer/trainer.json", quick="two rounds", against=True)
    parser.add_argument(
        "--models", nargs="+", choices=MODELS, default=["tiny"], metavar="MODEL", help=", ".join(MODELS)
    )
    parser.add_argument("--rows", nargs="+", choices=names, metavar="ROW", help=f"of: {', '.join(names)}")
    default = [way for way in WAYS if way not in NOT_BY_DEFAULT]
    parser.add_argument(
        "--ways", nargs="+", choices=WAYS, default=default, metavar="WAY", help=f"of: {', '.join(WAYS)}"
    )
    parser.add_argument("--server", action="store_true", help="also the ways through a whole server")
    parser.add_argument("--rounds", type=int, default=5, help="steps of each way (default: 5)")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch in each way (default: 1)")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="cpu: for a machine that is busy")
    options = parser.parse_args()
    options.ways = list(dict.fromkeys([*options.ways, *(OF_SERVER if options.server else ())]))
    return options


def main() -> None:
    options = _arguments()
    facts = machine.facts() | {"clock": options.clock, "threads": options.threads}
    cuda = torch.cuda.is_available()
    facts["device"] = torch.cuda.get_device_name() if cuda else "cpu"
    by_model: dict[str, list[Result]] = {}
    with TemporaryDirectory(prefix="skyrl-trainer-") as directory, ExitStack() as stack:
        before = program.builds(options.against, stack).get(BEFORE)
        for name in options.models:
            model = MODELS[name](Path(directory) / name)
            for row in rows_of(name, options.rows, cuda=cuda):
                ways = [way for way in options.ways if way not in MERGED or row.merges]
                ways += [BEFORE] if before is not None else []
                rounds = 2 if options.quick else options.rounds
                found = measure(model, row, ways, rounds, options.threads, options.clock, before)
                by_model.setdefault(name, []).extend(found)
                print(table({name: found}), flush=True)
    print(f"\n{table(by_model)}\n\n{', '.join(f'{key} {value}' for key, value in facts.items())}")
    program.write(options.out, {"facts": facts, "results": by_model})


if __name__ == "__main__":
    main()
