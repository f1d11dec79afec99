"""Seconds of an RL step on a really trained model, through the SDK and a whole server with trainer and vLLM.

    python -m benchmarks.real_step --model DIRECTORY [--against COMMIT] [--trl PYTHON] [--seeds 0 1 2] [--steps 20]
                                   [--out FILE]

A step saves the weights, samples `--prompts` × `--group` answers to "Compute a + b.", and trains on them. With
`--against` the same steps run on a server of that commit of this repository, which `git archive` takes out into a
temporary directory; the two servers take turns, so that other load on the machine meets both. A turn has some steps,
because a trainer that waits for half a minute gives its memory back, which a script with one server rarely sees. CPU
seconds are those of the processes of vLLM and of the trainer, which other load disturbs less than the clock. With
`--trl` the first steps of the first seed also run in TRL's GRPOTrainer (`benchmarks/trl_step.py`), by the Python of an
environment that has it: `pip install trl==1.16.0 transformers==5.19.0 peft==0.21.2 torch==2.13.0`.

Knows the SDK and the processes of a server. Fetches no model: DIRECTORY is one of transformers with a chat template.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import time
from collections.abc import Generator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import tinker
from tinker import types

from benchmarks import program
from benchmarks.machine import ROOT
from benchmarks.processes import computing_of, cpu_seconds
from benchmarks.stage import server_of
from benchmarks.sums import questions, reward
from benchmarks.table import Row, Target, text_table
from skyrl.cli.demo.rl import advantages, datum

OF_BEFORE, OF_TRL = 0.35, 0.2
"""The parts of the time of the commit of `--against 310e1dd5`, and of TRL, that a step may take."""
TRL_STEPS = 3
READY_S = 900.0
"""How long a server may take to start beside other load."""
UNCOUNTED = 1
"""The first step, in which allocators and caches get warm."""


@dataclass(frozen=True)
class Step:
    """One step: seconds of its parts, CPU seconds of two kinds of processes, and the mean reward of its samples."""

    save_s: float
    sample_s: float
    forward_backward_s: float
    optim_step_s: float
    vllm_cpu_s: float
    trainer_cpu_s: float
    reward: float

    @property
    def seconds(self) -> float:
        return self.save_s + self.sample_s + self.forward_backward_s + self.optim_step_s


class Side:
    """A server of one build, and its runs."""

    def __init__(self, name: str, root: Path, options: argparse.Namespace, stack: ExitStack) -> None:
        self.name = name
        self._options = options
        settings = {} if options.threads is None else {"threads": options.threads}
        engine = {"generator.inference_engine.max_model_len": options.context}
        flags = ("--base-model", str(options.model))
        self._server = server_of(stack, *flags, root=root, engine=engine, **settings)

    def wait_ready(self) -> None:
        self._server.wait_ready(READY_S)
        self._pids = computing_of(self._server.pid)

    def run(self, seed: int) -> Generator[Step]:
        """The steps of one model, which starts with new weights. Prompts depend on the seed and the step."""
        options = self._options
        adam = types.AdamParams(learning_rate=options.learning_rate)
        params = types.SamplingParams(max_tokens=options.max_tokens, temperature=1.0)
        with tinker.ServiceClient(base_url=self._server.url, api_key=f"tml-step-{seed}") as service:
            trainer = service.create_lora_training_client(
                base_model=str(options.model), rank=options.rank, seed=seed
            ).result()
            tokenizer: Any = trainer.get_tokenizer()
            for number in range(options.steps):
                asked = questions(seed, number, options.prompts)
                prompts = [_prompt(tokenizer, question) for question, _ in asked]
                cpu = self._cpu()
                marks = [time.perf_counter()]
                sampler = trainer.save_weights_and_get_sampling_client().result()
                marks.append(time.perf_counter())
                pending = [
                    sampler.sample(types.ModelInput.from_ints(prompt), options.group, params) for prompt in prompts
                ]
                groups = [future.result().sequences for future in pending]
                marks.append(time.perf_counter())
                data: list[types.Datum] = []
                rewards: list[float] = []
                for prompt, (_, answer), group in zip(prompts, asked, groups, strict=True):
                    graded = [reward(tokenizer.decode(each.tokens), answer) for each in group]
                    rewards += graded
                    for each, advantage in zip(group, advantages(graded), strict=True):
                        data.append(datum(prompt, list(each.tokens), list(each.logprobs or ()), advantage))
                began = time.perf_counter()
                trainer.forward_backward(data, "importance_sampling").result()
                middle = time.perf_counter()
                trainer.optim_step(adam).result()
                end = time.perf_counter()
                spent = {name: value - cpu[name] for name, value in self._cpu().items()}
                yield Step(
                    save_s=marks[1] - marks[0],
                    sample_s=marks[2] - marks[1],
                    forward_backward_s=middle - began,
                    optim_step_s=end - middle,
                    vllm_cpu_s=spent["vLLM"],
                    trainer_cpu_s=spent["trainer"],
                    reward=statistics.mean(rewards),
                )

    def _cpu(self) -> dict[str, float]:
        return {name: sum(map(cpu_seconds, pids)) for name, pids in self._pids.items()}


def _prompt(tokenizer: Any, question: str) -> list[int]:
    messages = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return tokenizer.encode(text, add_special_tokens=False)


class Trl:
    """TRL's trainer in a process of its own, which makes a step when it is told to."""

    def __init__(self, options: argparse.Namespace, stack: ExitStack) -> None:
        names = ("rank", "prompts", "group", "max_tokens", "learning_rate")
        settings = {name: getattr(options, name) for name in names}
        settings |= {"model": str(options.model), "seed": options.seeds[0], "steps": TRL_STEPS}
        settings["threads"] = options.threads or os.cpu_count()
        command = [str(options.trl.absolute()), "-m", "benchmarks.trl_step", json.dumps(settings)]
        self._process = stack.enter_context(
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        )
        stack.callback(self._process.terminate)

    def step(self) -> dict[str, float]:
        """Seconds of `sample` and of `train`, and the mean `reward`."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("step "):
                return json.loads(line.removeprefix("step "))
        raise RuntimeError(f"TRL ended with {self._process.wait()}")


def _arguments() -> argparse.Namespace:
    parser = program.parser("real_step", __doc__, out="bench/real-step.json", against=True)
    parser.add_argument("--model", type=Path, required=True, help="directory of a model with a chat template")
    parser.add_argument("--trl", type=Path, metavar="PYTHON", help="of an environment with trl")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="one run for each")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--turn", type=int, default=5, help="steps of a side before the other one's")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--group", type=int, default=8, help="samples of each prompt")
    parser.add_argument("--max-tokens", type=int, default=12)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    parser.add_argument("--context", type=int, default=512, help="vLLM's longest sequence; decides its memory")
    parser.add_argument("--threads", type=int, help="of both servers; each build's default if not given")
    return parser.parse_args()


def _measured(
    sides: list[Side], trl: Trl | None, options: argparse.Namespace
) -> tuple[dict[str, list[list[Step]]], list[dict[str, float]]]:
    """The steps of each side, for each seed, and those of TRL. Of two sides the one that begins alternates."""
    found: dict[str, list[list[Step]]] = {side.name: [] for side in sides}
    of_trl: list[dict[str, float]] = []
    for seed in options.seeds:
        runs = {side.name: side.run(seed) for side in sides}
        for side in sides:
            found[side.name].append([])
        for first in range(0, options.steps, options.turn):
            numbers = range(first, min(first + options.turn, options.steps))
            for side in sides if first // options.turn % 2 == 0 else sides[::-1]:
                for number in numbers:
                    step = next(runs[side.name])
                    found[side.name][-1].append(step)
                    print(f"seed {seed} step {number} {side.name}: {step.seconds:.2f} s, {step}", flush=True)
            if trl is not None and len(of_trl) < TRL_STEPS:
                of_trl.append(trl.step())
                print(f"step {len(of_trl) - 1} TRL: {of_trl[-1]}", flush=True)
        for run in runs.values():
            run.close()  # ends the SDK's session
    return found, of_trl


def _rows(found: dict[str, list[list[Step]]], of_trl: list[dict[str, float]]) -> list[Row]:
    """Medians of the steps of each side; `direct` is the other build, and TRL in the last rows."""
    counted = {name: [step for run in runs for step in run[UNCOUNTED:]] for name, runs in found.items()}

    def median(name: str, field: str) -> float | None:
        return statistics.median(getattr(step, field) for step in counted[name]) if name in counted else None

    rows = []
    for field in ("seconds", *(field.name for field in fields(Step) if field.name != "reward")):
        before = median("before", field)
        target = Target(OF_BEFORE * before) if field == "seconds" and before is not None else None
        what = field.removesuffix("_s").replace("_", " ")
        rows.append(Row("real-step", what, "s", median("now", field) or 0.0, target, before))
    last = {name: [statistics.mean(step.reward for step in run[-3:]) for run in runs] for name, runs in found.items()}
    note = "; ".join(f"{name} {', '.join(f'{value:.2f}' for value in values)}" for name, values in last.items())
    before = statistics.mean(last["before"]) if "before" in last else None
    reward = statistics.mean(last["now"])
    rows.append(Row("real-step", "reward of the last three steps", "", reward, None, before, note=note))
    if counted_trl := of_trl[UNCOUNTED:]:
        own = {"sample": median("now", "sample_s"), "train": median("now", "forward_backward_s")}
        own["step"] = median("now", "seconds")
        theirs = {name: statistics.median(each[name] for each in counted_trl) for name in ("sample", "train")}
        theirs["step"] = statistics.median(each["sample"] + each["train"] for each in counted_trl)
        for name, direct in theirs.items():
            target = Target(OF_TRL * direct) if name == "step" else None
            rows.append(Row("real-step", f"{name}, beside TRL", "s", own[name] or 0.0, target, direct))
    return rows


def main() -> None:
    options = _arguments()
    options.model = options.model.resolve()
    with ExitStack() as stack:
        roots = program.builds(options.against, stack)
        sides = [Side(name, root, options, stack) for name, root in roots.items()]
        for side in sides:
            side.wait_ready()
        trl = Trl(options, stack) if options.trl else None
        found, of_trl = _measured(sides, trl, options)
    print("\n" + text_table(_rows(found, of_trl)))
    raw = {name: [[asdict(step) for step in run] for run in runs] for name, runs in found.items()}
    settings = {name: value for name, value in vars(options).items() if name not in ("model", "out", "trl")}
    program.write(options.out, {"settings": settings, "steps": raw, "trl": of_trl})


if __name__ == "__main__":
    main()
