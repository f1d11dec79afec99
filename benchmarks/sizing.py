"""Compares the formulas of docs/operating/sizing.md with measurements on this machine, on a CPU.

Usage: python -m benchmarks.sizing [--only PART ...] [--out DIRECTORY]

The parts: trainer (one rank, random weights of the shape of Qwen3-0.6B), vllm (the tiny model, and 0.6B), ray (one and
three nodes on addresses of the loopback). Takes some five minutes and 8 GB. Each measurement is a process of its own.
Memory of processes that share pages is PSS. The trainer's is resident memory: on a CPU the base model stays in pages of
its file.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil

from benchmarks import machine
from benchmarks.models import make_large
from benchmarks.processes import resident_mb
from benchmarks.stage import rollout
from benchmarks.table import number
from skyrl.base.tiny import model_path
from skyrl.runtime.processes.supervision import dies_with_parent

MEGABYTE = 1e6
FLOAT = 4
RANK = 8
LOGITS_CHUNK, LOGITS_CHUNKS = 128 * 2**20, 3
VLLM_MB, RAY_MB, RAY_NODE_MB = 850, 400, 120
"""What a vLLM's processes take without weights and cache; a Ray cluster of one node with its driver; one more node."""
Result = dict[str, Any]
RESULTS = Path("out/sizing")
OPTIONS = {"generator.inference_engine.max_model_len": 1024}


class Shape:
    """The numbers of a model's config.json that the formulas need."""

    def __init__(self, model: Path) -> None:
        config = json.loads((model / "config.json").read_text())
        self.layers, self.hidden = config["num_hidden_layers"], config["hidden_size"]
        self.between, self.vocabulary = config["intermediate_size"], config["vocab_size"]
        self.queries = config["num_attention_heads"] * config["head_dim"]
        self.keys = config["num_key_value_heads"] * config["head_dim"]
        self.tied = config["tie_word_embeddings"]

    def linears(self) -> list[tuple[int, int]]:
        """In and out features of the linear layers that an adapter trains."""
        hidden, between = self.hidden, self.between
        attention = [(hidden, self.queries), (hidden, self.keys), (hidden, self.keys), (self.queries, hidden)]
        layer = [*attention, (hidden, between), (hidden, between), (between, hidden)]
        return [*layer * self.layers, (hidden, self.vocabulary)]

    def parameters(self) -> int:
        in_layers = sum(ins * outs for ins, outs in self.linears()[:-1])
        return in_layers + self.hidden * self.vocabulary * (1 if self.tied else 2)

    def adapter_bytes(self) -> int:
        """Weights, gradient and two moments."""
        return 4 * FLOAT * RANK * sum(ins + outs for ins, outs in self.linears())

    def activation_bytes(self, tokens: int, *, checkpointing: bool) -> int:
        """What one micro-batch keeps for its backward. A layer keeps 14 values of the hidden width, 4 of the MLP's and
        4 of the attention's for each token; with checkpointing one layer does, and the others keep their input."""
        layer = 14 * self.hidden + 4 * self.between + 4 * (self.queries + 2 * self.keys)
        floats = layer + self.layers * self.hidden if checkpointing else self.layers * layer
        return tokens * FLOAT * floats

    def logits_bytes(self, tokens: int) -> int:
        return LOGITS_CHUNKS * min(LOGITS_CHUNK, tokens * self.vocabulary * FLOAT)

    def kv_bytes(self, tokens: int) -> int:
        """Keys and values of so many tokens in vLLM on a CPU."""
        return 2 * self.layers * self.keys * FLOAT * tokens


def own_mb() -> float:
    return resident_mb(os.getpid()) * 2**20 / MEGABYTE


class Peak:
    """The largest resident memory of this process while the block runs."""

    def __enter__(self) -> Peak:
        self.mb, self._ended = 0.0, threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._ended.wait(0.005):
            self.mb = max(self.mb, own_mb())

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()


def one_rank(model: str, tokens: int, checkpointing: bool) -> Result:
    """Memory of a trainer with one rank and one adapter. Runs in a process of its own."""
    import numpy as np

    from skyrl.base.config.loading import load_config
    from skyrl.base.types.lora import LoraSpec
    from skyrl.training.backends.base import AdamParams, Datum, TrainingPass
    from skyrl.training.backends.torch_lora.backend import TorchLoraBackend

    imported = own_mb()
    backend_config = {"trainer.micro_batch_tokens": tokens, "trainer.gradient_checkpointing": checkpointing}
    backend = TorchLoraBackend(load_config({"base_model": model, "backend_config": backend_config}))
    loaded = own_mb()
    row = np.arange(tokens + 1) % 200
    some_pass = TrainingPass("a", [Datum(row[:-1], {"target_tokens": row[1:]})], "cross_entropy")
    backend.create_model("a", LoraSpec(RANK, 32.0, seed=1))
    backend.run([some_pass])
    backend.optim_step("a", AdamParams())
    with_adapter = own_mb()
    with Peak() as peak:
        began = time.perf_counter()
        backend.run([some_pass])
        took = time.perf_counter() - began
    return {"imported": imported, "loaded": loaded, "rest": with_adapter, "peak": peak.mb, "seconds": took}


def trainer() -> list[Result]:
    rows: list[Result] = []
    with TemporaryDirectory(prefix="skyrl-sizing-") as directory:
        large = Path(directory) / "large"
        make_large(large)
        for name, model, tokens in (("0.6B", large, 128), ("0.6B", large, 512)):
            shape = Shape(Path(model))
            for checkpointing in (False, True):
                run = _in_process("one_rank", str(model), tokens, checkpointing)
                what = f"trainer, {name}, {tokens} tokens{', checkpointing' if checkpointing else ''}"
                base = shape.parameters() * FLOAT / MEGABYTE
                passing = (
                    shape.activation_bytes(tokens, checkpointing=checkpointing) + shape.logits_bytes(tokens)
                ) / MEGABYTE
                adapter = shape.adapter_bytes() / MEGABYTE
                rows.append(_row(f"{what}: base model", base, run["loaded"] - run["imported"], run))
                rows.append(_row(f"{what}: all at the peak", run["imported"] + base + adapter + passing, run["peak"]))
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
        log = "".join(file.read_text(errors="replace") for file in Path(directory).rglob("vllm*.log"))
    shape = Shape(model)
    said = re.search(r"KV cache size: ([0-9,]+) tokens", log)
    tokens = int(said[1].replace(",", "")) if said else 0
    base, keys = shape.parameters() * FLOAT / MEGABYTE, shape.kv_bytes(tokens) / MEGABYTE
    details = {"processes": len(found), "base_mb": base, "kv_tokens": tokens, "kv_mb": keys}
    what = f"vLLM, {name}: {VLLM_MB} + base model + keys and values"
    return _row(what, VLLM_MB + base + keys, measured, details)


def _is_vllm(process: psutil.Process) -> bool:
    try:
        return "vllm" in " ".join(process.cmdline()).lower() or "vllm" in process.name().lower()
    except psutil.NoSuchProcess:
        return False


class _Echo:
    def echo(self) -> int:
        return 1


def ray_cluster(nodes: int) -> Result:
    """Seconds and memory of a Ray cluster on loopback, without a dashboard. Runs in a process of its own."""
    import ray
    from ray.cluster_utils import Cluster

    began = time.perf_counter()
    size = {"include_dashboard": False, "object_store_memory": 80 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "node_ip_address": "127.0.0.2", **size})
    for node in range(1, nodes):
        cluster.add_node(num_cpus=1, node_ip_address=f"127.0.0.{node + 2}", object_store_memory=80 * 2**20)
    started = time.perf_counter() - began
    ray.init(address=cluster.address, _node_ip_address="127.0.0.2", log_to_driver=False)
    driver = time.perf_counter() - began - started
    time.sleep(2)
    mb = sum(map(_pss_mb, psutil.Process().children(recursive=True)))

    began = time.perf_counter()
    actor_class: Any = ray.remote(num_cpus=0)(_Echo)
    actor = actor_class.remote()
    ray.get(actor.echo.remote())
    first = time.perf_counter() - began
    began = time.perf_counter()
    for _ in range(100):
        ray.get(actor.echo.remote())
    call = (time.perf_counter() - began) / 100
    ray.shutdown()
    cluster.shutdown()
    return {"started_s": started, "driver_s": driver, "mb": mb, "first_actor_s": first, "call_ms": call * 1e3}


def ray_nodes() -> list[Result]:
    rows: list[Result] = []
    for nodes in (1, 3):
        run = _in_process("ray_cluster", nodes)
        what = f"Ray, {nodes} nodes: {RAY_MB} + {RAY_NODE_MB} for each further node"
        rows.append(_row(what, RAY_MB + RAY_NODE_MB * (nodes - 1), run["mb"], run))
    return rows


def _pss_mb(process: psutil.Process) -> float:
    try:
        text = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return 0.0
    return next(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:")) * 1024 / MEGABYTE


def _row(what: str, formula: float, measured: float, details: Result | None = None) -> Result:
    return {"what": what, "formula_mb": formula, "measured_mb": measured, "details": details or {}}


def _in_process(function: str, *arguments: object) -> Result:
    program = f"import json; from benchmarks import sizing; print(json.dumps(sizing.{function}(*{arguments!r})))"
    command = dies_with_parent([sys.executable, "-c", program])
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=300).stdout
    return json.loads(output.splitlines()[-1])


PARTS = {"trainer": trainer, "vllm": vllm, "ray": ray_nodes}


def table(rows: Iterable[Result]) -> str:
    lines = []
    for row in rows:
        details = ", ".join(f"{name} {number(value)}" for name, value in row["details"].items())
        share = row["measured_mb"] / row["formula_mb"]
        figures = f"formula {number(row['formula_mb'])} MB, measured {number(row['measured_mb'])} MB ({share:.2f})"
        lines += [f"{row['what']}: {figures}", *([f"    {details}"] if details else [])]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sizing", description=__doc__)
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
