"""How many steps and tokens the same answers cost vLLM's scheduler, by when requests begin. Counts: no clock, no noise.

Usage: python -m benchmarks.scheduling [--against COMMIT] [--samples 200] [--seeds 2] [--quick] [--out FILE]

vLLM's own scheduler and cache, and answers whose lengths are drawn before: no model runs. All samples wait from the
beginning, as those of a step of RL do. Compared are the plugin's admission, vLLM alone with all at once and with fixed
numbers, and an oracle that knows each length and throws nothing out. `bound`: the fewest steps that the room allows,
with every block in use in every step. Milliseconds are by COSTS, fitted to the steps of a real vLLM by
`benchmarks.concurrency`; `of best` compares them with the best fixed number, `of its steps` the steps alone.
"""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import subprocess
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of torch, for what vLLM imports
    import torch
    from vllm import SamplingParams
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request
    from vllm.v1.structured_output import StructuredOutputManager

    from skyrl.inference.vllm_plugin import admission

from benchmarks import program
from benchmarks.machine import ROOT
from benchmarks.table import aligned, number
from skyrl.base.tiny import model_path

if TYPE_CHECKING:
    from vllm.config import VllmConfig

BLOCK, BLOCKS = 32, 65
"""Tokens of a block; blocks, of which one is vLLM's own."""
END, OTHER = 7, 9
FIXED = (4, 8, 12, 16, 20, 24, 32, 64)
COSTS = 5.0, 0.04, 0.15
"""Milliseconds of a step, of a token that it computes, and of a sequence in it: the tiny model, one core."""


class Asked(NamedTuple):
    """A sample: the tokens of its prompt, of its answer, and its `max_tokens`."""

    prompt: int
    length: int
    most: int


class Counts(NamedTuple):
    steps: int
    tokens: int
    sequences: int
    preemptions: int

    @property
    def ms(self) -> float:
        return sum(cost * count for cost, count in zip(COSTS, self, strict=False))


class Cache:
    """A scheduler with a small cache, whose requests end when they have the lengths that are given."""

    def __init__(self, config: VllmConfig, watermark: float = 0.0, *, headroom: bool = True) -> None:
        """Without `headroom` vLLM admits as it does without the plugin."""
        config.cache_config.num_gpu_blocks = BLOCKS
        config.scheduler_config.watermark = watermark
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=32, dtype=torch.float32)
        cache = KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(["layer"], spec)])
        self.scheduler = Scheduler(config, cache, StructuredOutputManager(config), BLOCK, BLOCK, log_stats=True)
        manager: Any = self.scheduler.kv_cache_manager
        self.headroom: admission.Headroom = manager.skyrl_headroom
        if not headroom:
            manager.skyrl_headroom = None
        algorithm = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        init_none_hash(algorithm)
        self._hasher = get_request_block_hasher(BLOCK, algorithm)
        self.preemptions = self.computed = self.steps = self.sequences = 0
        self.ended: list[str] = []
        self.lengths: dict[str, int] = {}
        self._requests: dict[str, Request] = {}

    def add(self, length: int, *, prompt: int = 20, most: int = 400, priority: int = 0) -> Request:
        name = f"r{len(self._requests)}"
        sampling = SamplingParams(max_tokens=most, stop_token_ids=[END])
        tokens = [len(self._requests)] * prompt
        request = Request(name, tokens, sampling, None, block_hasher=self._hasher, priority=priority)
        self.lengths[name], self._requests[name] = length, request
        self.scheduler.add_request(request)
        return request

    def step(self) -> list[str]:
        """The names of the requests that computed something."""
        output = self.scheduler.schedule()
        names = list(output.num_scheduled_tokens)
        self.preemptions += len(output.preempted_req_ids or ())
        self.computed += output.total_num_scheduled_tokens
        self.steps += 1
        self.sequences += len(names)
        last = [self._requests[name].num_output_tokens + 1 >= self.lengths[name] for name in names]
        sampled = [[END if ends else OTHER] for ends in last]
        rows = {name: row for row, name in enumerate(names)}
        self.scheduler.update_from_output(output, ModelRunnerOutput(names, rows, sampled))
        self.ended += [name for name in names if self._requests[name].is_finished()]
        return names

    def run(self) -> Counts:
        while self.scheduler.has_unfinished_requests():
            self.step()
            assert self.steps < 50_000, "requests wait for ever"
        return Counts(self.steps, self.computed, self.sequences, self.preemptions)


def asked(kind: str, samples: int, seed: int) -> list[Asked]:
    """Short prompts with long answers, long prompts, or four in five short: lengths of answers as of a model."""
    rng = random.Random(f"{kind} {seed}")
    found = []
    for place in range(samples):
        short = kind == "short" or (kind == "mixed" and place % 5 > 0)
        prompt, most = (rng.randint(16, 30), 400) if short else (rng.randint(300, 450), 200)
        length = max(1, min(most, int(rng.lognormvariate(math.log(most / 4), 0.5))))
        found.append(Asked(prompt, length, most))
    rng.shuffle(found)
    return found


def counted(config: VllmConfig, samples: Sequence[Asked], way: str) -> Counts:
    """The counts of all samples. `way`: `skyrl`, `oracle`, `all at once`, or a fixed number."""
    cache = Cache(config, headroom=way in ("skyrl", "oracle"))
    if way.isdecimal():
        cache.scheduler.max_num_active_reqs = int(way)
    for place, each in enumerate(samples):
        cache.add(each.length, prompt=each.prompt, most=each.most, priority=place)
    if way == "oracle":
        cache.headroom.blocks = lambda request: _needed(cache, request)  # type: ignore[method-assign]
    return cache.run()


def _needed(cache: Cache, request: Request) -> int:
    """The most blocks that this request and the running ones will hold beyond what they hold when it begins."""
    now = [
        (cache.lengths[each.request_id] - each.num_output_tokens, each.num_tokens)
        for each in (*cache.scheduler.running, request)
    ]
    held = sum(-(-tokens // BLOCK) for _, tokens in now)
    ends = {left for left, _ in now}
    return max(sum(-(-(tokens + end) // BLOCK) for left, tokens in now if left >= end) for end in ends) - held


def bound(samples: Sequence[Asked]) -> int:
    """The fewest steps: a sample holds its blocks in as many steps as its answer has tokens."""
    held = sum(-(-(each.prompt + token) // BLOCK) for each in samples for token in range(each.length))
    return -(-held // (BLOCKS - 1))


def _measure(samples: int, seeds: int, ways: Sequence[str]) -> dict[str, dict[str, Counts]]:
    """By load and way, the sums over the seeds. The way `bound` has only steps."""
    os.environ["VLLM_PLUGINS"] = ""  # the plugin's admission alone is applied, here
    admission.keep_headroom()
    model = {"model": str(model_path()), "dtype": "float32", "block_size": BLOCK, "max_model_len": 1024}
    config = EngineArgs(**model, scheduling_policy="priority").create_engine_config()
    found: dict[str, dict[str, Counts]] = {}
    for kind in ("short", "long", "mixed"):
        loads = [asked(kind, samples, seed) for seed in range(seeds)]
        found[kind] = {way: _sum([counted(config, load, way) for load in loads]) for way in ways}
        found[kind]["bound"] = Counts(sum(map(bound, loads)), 0, 0, 0)
    return found


def _sum(found: Sequence[Counts]) -> Counts:
    return Counts(*map(sum, zip(*found, strict=True)))


def _before(commit: str, samples: int, seeds: int, directory: Path) -> dict[str, dict[str, Counts]]:
    """What the admission of that commit does, in a process with its `skyrl` and this `benchmarks`."""
    shutil.rmtree(program.taken_out(commit, directory) / "benchmarks")
    environment = os.environ | {"PYTHONPATH": f"{directory}:{ROOT}"}
    command = [
        sys.executable,
        "-P",
        "-m",
        "benchmarks.scheduling",
        "--alone",
        "--samples",
        str(samples),
        "--seeds",
        str(seeds),
    ]
    printed = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
    found = json.loads(printed.splitlines()[-1])
    return {kind: {way: Counts(*each) for way, each in ways.items()} for kind, ways in found.items()}


def main() -> None:
    parser = program.parser("scheduling", __doc__, out="bench/scheduling.json", quick="fewer samples", against=True)
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--alone", action="store_true", help="print the plugin's admission alone, as JSON")
    options = parser.parse_args()
    samples, seeds = (100, 1) if options.quick else (options.samples, options.seeds)
    if options.alone:
        print(json.dumps(_measure(samples, seeds, ["skyrl"])))
        return
    found = _measure(samples, seeds, ["skyrl", "oracle", "all at once", *map(str, FIXED)])
    if options.against:
        with TemporaryDirectory() as directory:
            for kind, ways in _before(options.against, samples, seeds, Path(directory)).items():
                found[kind][f"skyrl, {options.against}"] = ways["skyrl"]
    rows = [
        ["load", "way", "steps", "tokens", "sequences a step", "preemptions per 100", "ms", "of best", "of its steps"]
    ]
    for kind, ways in found.items():
        fixed = [ways[str(each)] for each in FIXED]
        best, fewest = min(each.ms for each in fixed), min(each.steps for each in fixed)
        for way, each in ways.items():
            figures = (each.sequences / each.steps, 100 * each.preemptions / samples / seeds, each.ms)
            ratios = "" if way == "bound" else f"{best / each.ms:.3f}", f"{fewest / each.steps:.3f}"
            rows.append([kind, way, str(each.steps), str(each.tokens), *map(number, figures), *ratios])
    print(aligned(rows))
    program.write(
        options.out, {kind: {way: each._asdict() for way, each in ways.items()} for kind, ways in found.items()}
    )


if __name__ == "__main__":
    main()
