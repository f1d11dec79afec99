"""Memory of a server with a really trained model: what is predicted before its start, and what its processes take.

    python -m benchmarks.real_memory --model DIRECTORY [--context 4096] [--only CASE ...] [--out FILE]

A server of this checkout starts on the model. Its vLLM and its trainer are measured when it is ready, and at the peak
of each case. A page that several of them share counts once. The peak is the memory before a case, and what the kernel's
high-water marks of resident memory rise above the resident memory of then.

    sft-batch   one pass of 512-token sequences that fill a micro-batch, all tokens trained, and a step of the optimizer
    sft-long    one pass of a sequence as long as the context
    rl          a step of RL: 8 prompts × 8 samples of at most 12 tokens, and their pass
    sample      256 prompts of 32 tokens, which vLLM computes at once and samples together
    scores      a prompt of 1,000 tokens with the logprobs of its tokens

Knows the SDK and the processes of a server. Fetches no model: DIRECTORY is one of transformers with a tokenizer.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import tinker
from tinker import types

from benchmarks import machine, program
from benchmarks.processes import computing_of
from benchmarks.stage import ready_server
from benchmarks.table import aligned, number
from skyrl.base.config.loading import load_config
from skyrl.base.config.pass_memory import Passing
from skyrl.cli.demo.rl import datum
from skyrl.cli.launcher.memory_estimate import Need, need_of, size_of
from skyrl.engine.loop import TRIM_AFTER_S
from skyrl.inference.model_options import BLOCK_TOKENS
from skyrl.runtime.processes.host_resources import free_host_bytes
from skyrl.runtime.processes.usage import forget_peak_of, peak_resident_bytes, resident_bytes, shared_bytes

GROUPS = ("vLLM", "trainer")
READY_S = 900.0
SETTLE_S = TRIM_AFTER_S + 10.0
"""After which the trainer has given back what it freed, and vLLM has dropped the adapters of the check at its start."""
WARM = 128
"""Tokens of a first pass, which tells the trainer what a row keeps."""


@dataclass(frozen=True)
class Measured:
    """Bytes of one group of processes: before a case, at its peak, and after it. At rest all three are the same. The
    prediction follows from the host's `free` bytes before, from the `versions` of the adapter that vLLM has loaded, and
    the tokens of the blocks that it has taken (`computed`)."""

    case: str
    group: str
    before: float
    peak: float
    after: float
    predicted: float
    free: float = 0.0
    versions: int = 0
    computed: int = 0


class Client:
    """One training client of the SDK and what the cases do with it. Token ids are drawn from the second quarter of
    the vocabulary, where no special tokens are."""

    def __init__(self, service: tinker.ServiceClient, model: str, rank: int, vocabulary: int) -> None:
        self._trainer = service.create_lora_training_client(base_model=model, rank=rank, seed=0).result()
        self._draw = np.random.default_rng(0)
        self._vocabulary = vocabulary
        self.versions = 0
        """Of the adapter, that vLLM has loaded."""
        self.computed = 0
        """Tokens for which vLLM has taken blocks of its cache."""
        self._sampler = self._saved()
        self.supervised(1, WARM)

    def _saved(self) -> tinker.SamplingClient:
        self.versions += 1
        return self._trainer.save_weights_and_get_sampling_client().result()

    def tokens(self, count: int) -> list[int]:
        return self._draw.integers(self._vocabulary // 4, self._vocabulary // 2, count).tolist()

    def supervised(self, sequences: int, length: int) -> None:
        rows = [self.tokens(length + 1) for _ in range(sequences)]
        data = [
            types.Datum(
                model_input=types.ModelInput.from_ints(row[:-1]),
                loss_fn_inputs={
                    "target_tokens": types.TensorData.from_numpy(np.asarray(row[1:], np.int64)),
                    "weights": types.TensorData.from_numpy(np.ones(length, np.float32)),
                },
            )
            for row in rows
        ]
        self._trainer.forward_backward(data, "cross_entropy").result()
        self._trainer.optim_step(types.AdamParams(learning_rate=1e-5)).result()

    def reinforced(self) -> None:
        prompts = [self.tokens(PROMPT) for _ in range(ANSWERS // 8)]
        self._sampler = self._saved()
        groups = self.sampled(prompts, 8, ANSWER)
        data = [
            datum(prompt, list(each.tokens), list(each.logprobs or ()), (-1.0) ** index)
            for prompt, group in zip(prompts, groups, strict=True)
            for index, each in enumerate(group)
        ]
        self._trainer.forward_backward(data, "importance_sampling").result()
        self._trainer.optim_step(types.AdamParams(learning_rate=1e-5)).result()

    def sampled(
        self, prompts: Sequence[list[int]], group: int, max_tokens: int, *, scored: bool = False
    ) -> list[list[types.SampledSequence]]:
        blocks = [math.ceil((len(each) + max_tokens) / BLOCK_TOKENS) for each in prompts]
        self.computed += group * BLOCK_TOKENS * sum(blocks)
        params = types.SamplingParams(max_tokens=max_tokens, temperature=1.0)
        pending = [
            self._sampler.sample(types.ModelInput.from_ints(each), group, params, include_prompt_logprobs=scored)
            for each in prompts
        ]
        return [list(future.result().sequences) for future in pending]


Case = Callable[[Client], object]
SEQUENCES, ANSWERS, ANSWER, PROMPT, SCORED = 256, 64, 12, 40, 1000


def cases(context: int, rows: int) -> dict[str, Case]:
    """What is measured. `rows`: of a full micro-batch."""
    short = min(512, context)
    return {
        "rl": Client.reinforced,
        "sample": lambda client: client.sampled([client.tokens(32) for _ in range(SEQUENCES)], 1, 2),
        "scores": lambda client: client.sampled([client.tokens(min(SCORED, context - 1))], 1, 1, scored=True),
        "sft-batch": lambda client: client.supervised(rows // short, short),
        "sft-long": lambda client: client.supervised(1, context),
    }


class Prediction:
    """The bytes of each group at the peak of a case, by the formulas of the estimate before a start. vLLM's cache grows
    with each block, until it is full."""

    def __init__(self, need: Need, passing: Passing) -> None:
        self._need, self._passing = need, passing

    def at_rest(self, group: str) -> float:
        return self._need.vllms if group == "vLLM" else self._need.trainer

    def at_peak(self, case: str, group: str, client: Client, free: float) -> float | None:
        """None where the case gives the group nothing to do."""
        if group == "vLLM":
            return self._vllm(case, client)
        rows = {
            "rl": (ANSWERS * ANSWER + ANSWERS // 8 * PROMPT, ANSWERS * ANSWER),
            "sft-batch": (self._passing.rows, self._passing.rows),
            "sft-long": (self._passing.longest, self._passing.longest),
        }
        if case not in rows:
            return None
        of_case, trained = rows[case]
        return self._need.trainer + self._passing.peak(of_case, free, trained=trained)

    def _vllm(self, case: str, client: Client) -> float | None:
        use = self._need.use
        computing = {
            "rl": use.computing(ANSWERS // 8 * PROMPT, ANSWERS),
            "sample": use.computing(SEQUENCES * 32, SEQUENCES),
            "scores": use.scoring(SCORED),
        }
        if case not in computing:
            return None
        adapters = 2 * client.versions * self._passing.adapter
        return self._need.vllms + adapters + min(use.cache, client.computed * use.token) + computing[case]


def measure(pids: dict[str, list[int]], case: Callable[[], object]) -> dict[str, tuple[float, float, float]]:
    """Bytes of each group before a case, at its peak and after it."""
    every = [pid for group in pids.values() for pid in group]
    before, resident = shared_bytes(every), {pid: resident_bytes(pid) for pid in every}
    for pid in every:
        forget_peak_of(pid)
    case()
    risen = {pid: max(0, peak_resident_bytes(pid) - resident[pid]) for pid in every}
    after = shared_bytes(every)
    found: dict[str, tuple[float, float, float]] = {}
    for group, members in pids.items():
        rest = sum(before[pid] for pid in members)
        found[group] = rest, rest + sum(risen[pid] for pid in members), sum(after[pid] for pid in members)
    return found


def table(rows: Sequence[Measured]) -> str:
    lines = [["", "process", "predicted, GB", "measured, GB", "ratio", "before, GB", "after, GB"]]
    for row in rows:
        lines.append(
            [
                row.case,
                row.group,
                number(row.predicted / 1e9),
                number(row.peak / 1e9),
                number(row.predicted / row.peak),
                number(row.before / 1e9),
                number(row.after / 1e9),
            ]
        )
    return aligned(lines)


def run(options: argparse.Namespace, stack: ExitStack) -> list[Measured]:
    keys = {"generator.inference_engine.max_model_len": options.context}
    size = size_of(str(options.model))
    if size is None:
        raise SystemExit(f"{options.model} has no weights")
    need = need_of(load_config({"base_model": str(options.model), "backend_config": keys}), size)
    if need.passing is None:
        raise SystemExit("the passes of this model are not estimated")
    prediction = Prediction(need, replace(need.passing, rank=options.rank))
    flags = ("--base-model", str(options.model))
    server = stack.enter_context(ready_server(*flags, seconds=READY_S, engine=keys))
    time.sleep(SETTLE_S)
    pids = computing_of(server.pid)
    rows: list[Measured] = []
    at_rest = shared_bytes([pid for group in GROUPS for pid in pids[group]])
    for group in GROUPS:
        rest = sum(at_rest[pid] for pid in pids[group])
        rows.append(Measured("ready", group, rest, rest, rest, prediction.at_rest(group)))
    print(table(rows), flush=True)
    service = stack.enter_context(tinker.ServiceClient(base_url=server.url, api_key="tml-memory"))
    client = Client(service, str(options.model), options.rank, need.passing.widths.vocabulary)
    for name, case in cases(options.context, need.passing.rows).items():
        if name in options.only:
            time.sleep(SETTLE_S)
            free = free_host_bytes()
            found = measure(pids, lambda case=case: case(client))
            for group in GROUPS:
                if (predicted := prediction.at_peak(name, group, client, free)) is not None:
                    beside = free, client.versions, client.computed
                    rows.append(Measured(name, group, *found[group], predicted, *beside))
            print(table(rows), flush=True)
    return rows


def main() -> None:
    names = list(cases(1, 1))
    parser = program.parser("real_memory", __doc__, out="bench/real-memory.json")
    parser.add_argument("--model", type=Path, required=True, help="directory of a model")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="CASE")
    options = parser.parse_args()
    options.model = options.model.resolve()
    with ExitStack() as stack:
        rows = run(options, stack)
    print("\n" + table(rows))
    settings = {"context": options.context, "rank": options.rank, "cores": os.cpu_count()}
    found = {"facts": machine.facts(), "settings": settings, "rows": [asdict(row) for row in rows]}
    program.write(options.out, found)


if __name__ == "__main__":
    main()
