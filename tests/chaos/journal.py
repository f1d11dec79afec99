"""A tenant's journal: its inputs and the server's answers, one JSON line per step. Floats keep every bit."""

from __future__ import annotations

import json
import select
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Sample:
    """A sequence that was sampled from the weights of step `version`, before that step's training."""

    version: int
    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]


@dataclass
class Step:
    """One RL step. `data` are arguments of `skyrl.cli.demo.rl.datum`. `answers` holds the answer of each pass (metrics,
    and logprobs of every datum) and of each optimizer step (metrics). Afterwards the tenant saved its state under the
    name `saved`, or went on with a new model made from the state `loaded`. The step took `seconds`, and each of its
    updates `train_s`; it began at `began_at`, in seconds since the epoch."""

    samples: list[Sample] = field(default_factory=list)
    data: list[tuple[list[int], list[int], list[float], float]] = field(default_factory=list)
    answers: list[Any] = field(default_factory=list)
    saved: str | None = None
    loaded: str | None = None
    seconds: float = 0.0
    train_s: float = 0.0
    began_at: float = 0.0


def append(file: Path, step: Step) -> None:
    with file.open("a") as journal:
        journal.write(json.dumps(asdict(step)) + "\n")


def read(file: Path) -> list[Step]:
    """The whole steps so far."""
    steps = []
    for line in file.read_text().rpartition("\n")[0].splitlines():
        step = json.loads(line)
        samples = [Sample(**sample) for sample in step.pop("samples")]
        steps.append(Step(samples=samples, **step))
    return steps


def told_to_end() -> bool:
    """Whether a line has come on standard input, or its end: then a tenant makes no other step."""
    return bool(select.select([sys.stdin], [], [], 0)[0])
