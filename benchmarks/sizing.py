"""Compares the formulas of docs/operating/sizing.md with measurements on this machine, on a CPU.

Usage: python -m benchmarks.sizing [--only PART ...] [--out DIRECTORY]

The parts: trainer (one rank, random weights of the shape of Qwen3-0.6B), vllm (the tiny model, and 0.6B), ray (one and
three nodes on addresses of the loopback). Takes some five minutes and 6 GB. Each measurement is a process of its own.
Memory of processes that share pages is PSS. The trainer's is resident memory: on a CPU the base model stays in pages of
its file.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil

from benchmarks import machine
from benchmarks.models import Shape, make_large
from benchmarks.processes import forget_peak, peak_resident_mb, pss_mb, resident_mb
from benchmarks.stage import rollout
from benchmarks.table import aligned, number
from skyrl.base.config.loading import load_config
from skyrl.base.config.pass_memory import Passing, Widths
from skyrl.base.tiny import model_path
from skyrl.cli.launcher.memory_estimate import need_of, size_of
from skyrl.runtime.processes.supervision import dies_with_parent

MEGABYTE = 1e6
FLOAT = 4
RANK = 8
RAY_MB, RAY_NODE_MB = 400, 120
"""A Ray cluster of one node with its driver; one more node."""
Result = dict[str, Any]
RESULTS = Path("out/sizing")
OPTIONS = {"generator.inference_engine.max_model_len": 1024}


def own_mb() -> float:
    return resident_mb(os.getpid()) * 2**20 / MEGABYTE


def one_rank(model: str, tokens: int, checkpointing: bool) -> Result:
    """Memory of a trainer with one rank and one adapter. Runs in a process of its own."""
    import numpy as np

    from skyrl.base.types.weights import LoraSpec
    from skyrl.trainer.protocol import AdamParams, Datum, TrainingPass
    from skyrl.trainer.ranks.lora_backend import TorchLoraBackend

    imported = own_mb()
    backend_config = {"trainer.micro_batch_tokens": tokens, "trainer.gradient_checkpointing": checkpointing}
    backend = TorchLoraBackend(load_config({"base_model": model, "backend_config": backend_config}))
    loaded = own_mb()
    row = np.arange(tokens + 1) % 200
    some_pass = TrainingPass("a", [Datum(row[:-1], {"target_tokens": row[1:]})], "cross_entropy")
    backend.create_model("a", LoraSpec(RANK, 32.0, seed=1))
    backend.run([some_pass])
    backend.optim_step("a", AdamParams())
    forget_peak()
    backend.run([some_pass])
    peak = peak_resident_mb(os.getpid()) * 2**20 / MEGABYTE
    return {"imported": imported, "loaded": loaded, "peak": peak}


def trainer() -> list[Result]:
    rows: list[Result] = []
    with TemporaryDirectory(prefix="skyrl-sizing-") as directory:
        model = make_large(Path(directory) / "large")
        base = Shape(Path(model)).base_parameters() * FLOAT / MEGABYTE
        widths = Widths.of(json.loads((Path(model) / "config.json").read_text()))
        assert widths is not None
        for tokens, checkpointing in itertools.product((128, 512), (False, True)):
            run = _in_process("one_rank", model, tokens, checkpointing)
            what = f"trainer, 0.6B, {tokens} tokens{', checkpointing' if checkpointing else ''}"
            free = 0.0 if checkpointing else math.inf
            passing = Passing(widths, RANK, tokens, tokens).peak(tokens, free) / MEGABYTE
            rows.append(_row(f"{what}: base model", base, run["loaded"] - run["imported"]))
            rows.append(_row(f"{what}: all at the peak", run["imported"] + base + passing, run["peak"]))
    return rows


def vllm() -> list[Result]:
    with TemporaryDirectory(prefix="skyrl-sizing-") as directory:
        large = Path(directory) / "large"
        make_large(large)
        return [_one_vllm(name, model) for name, model in (("tiny", Path(model_path())), ("0.6B", large))]


def _one_vllm(name: str, model: Path) -> Result:
    """A vLLM as `skyrl rollout` starts it: its processes, and its cache of keys and values."""
    with TemporaryDirectory(prefix="skyrl-sizing-") as directory, rollout(Path(directory), str(model), 1, OPTIONS):
        found = [each for each in psutil.Process().children(recursive=True) if _is_vllm(each)]
        measured = sum(map(_pss_mb, found))
    size = size_of(str(model))
    assert size is not None
    need = need_of(load_config({"base_model": str(model), "backend_config": OPTIONS}), size)
    return _row(f"vLLM, {name}, when it is ready", need.vllms / MEGABYTE, measured)


def _is_vllm(process: psutil.Process) -> bool:
    try:
        return "vllm" in " ".join(process.cmdline()).lower() or "vllm" in process.name().lower()
    except psutil.NoSuchProcess:
        return False


def ray_cluster(nodes: int) -> Result:
    """Memory of a Ray cluster on loopback, without a dashboard. Runs in a process of its own."""
    import ray
    from ray.cluster_utils import Cluster

    size = {"include_dashboard": False, "object_store_memory": 80 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "node_ip_address": "127.0.0.2", **size})
    for node in range(1, nodes):
        cluster.add_node(num_cpus=1, node_ip_address=f"127.0.0.{node + 2}", object_store_memory=80 * 2**20)
    ray.init(address=cluster.address, _node_ip_address="127.0.0.2", log_to_driver=False)
    time.sleep(2)
    mb = sum(map(_pss_mb, psutil.Process().children(recursive=True)))
    ray.shutdown()
    cluster.shutdown()
    return {"mb": mb}


def ray_nodes() -> list[Result]:
    what = f"Ray, {{}} nodes: {RAY_MB} + {RAY_NODE_MB} for each further node"
    return [
        _row(what.format(nodes), RAY_MB + RAY_NODE_MB * (nodes - 1), _in_process("ray_cluster", nodes)["mb"])
        for nodes in (1, 3)
    ]


def _pss_mb(process: psutil.Process) -> float:
    try:
        return pss_mb(process.pid) * 2**20 / MEGABYTE
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return 0.0


def _row(what: str, formula: float, measured: float) -> Result:
    return {"what": what, "formula_mb": formula, "measured_mb": measured}


def _in_process(function: str, *arguments: object) -> Result:
    program = f"import json; from benchmarks import sizing; print(json.dumps(sizing.{function}(*{arguments!r})))"
    command = dies_with_parent([sys.executable, "-c", program])
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=300).stdout
    return json.loads(output.splitlines()[-1])


PARTS = {"trainer": trainer, "vllm": vllm, "ray": ray_nodes}


def table(rows: Iterable[Result]) -> str:
    lines = [["", "formula, MB", "measured, MB", "ratio"]]
    for row in rows:
        formula, measured = row["formula_mb"], row["measured_mb"]
        lines.append([row["what"], number(formula), number(measured), number(measured / formula)])
    return aligned(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sizing", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART")
    parser.add_argument("--out", type=Path, default=RESULTS, help="directory for sizing.json (default: out/sizing)")
    options = parser.parse_args()
    facts, rows = machine.facts(), []
    for name in options.only:
        found = PARTS[name]()
        print(table(found), flush=True)
        rows += found
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "sizing.json").write_text(json.dumps({"facts": facts, "rows": rows}, indent=1) + "\n")
    print(f"written: {options.out / 'sizing.json'}")


if __name__ == "__main__":
    main()
