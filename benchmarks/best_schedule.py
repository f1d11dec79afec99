"""The shortest time in which two RL loops can run beside each other, whoever goes first at each moment.

A loop is a chain of phases: it samples, trains on the samples, and samples again with the new weights. Its phases and
the cores that each takes are measured with the loop alone. Of two loops, one point in the plane says how far both are:
(seconds of the first loop's chain, seconds of the second's). A schedule is a path from (0, 0) to both ends. Along the
first axis only the first loop runs, along the second only the second, and on the diagonal both do:

- Both train: the trainer is one thread, so the diagonal is closed.
- Else: both run at full speed if their phases take no more cores together than there are, and no more than the whole of
  vLLM's thread; and slower by the larger ratio if they take more. So two loops that sample take as much of that thread
  as both alone. A batch of both could save some of it. With the tiny model on CPUs it does not: vLLM's CPU seconds of
  loops beside each other are the sum of those alone.

Apart from that, the shortest path is the least of what any schedule takes, also of one that knows how long each phase
will be. `greedy` is what the server does: nobody waits for anything but the trainer, and the loop that came first keeps
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

CELL_S = 0.01
"""The grain of the plane."""


@dataclass(frozen=True)
class Phase:
    """`cores` is how many of them the phase takes while its loop is alone, and `vllm` its share of vLLM's thread."""

    seconds: float
    cores: float
    trains: bool
    vllm: float = 0.0


def shortest(first: Sequence[Phase], second: Sequence[Phase], cores: int) -> float:
    """Seconds of the shortest schedule of both loops."""
    one, other = _cells(first), _cells(second)
    before = [CELL_S * column for column in range(len(other) + 1)]
    for row, mine in enumerate(one, 1):
        now = [CELL_S * row]
        for column, theirs in enumerate(other, 1):
            alone = min(before[column], now[column - 1]) + CELL_S
            together = before[column - 1] + _both(mine, theirs, cores)
            now.append(min(alone, together))
        before = now
    return before[-1]


def greedy(first: Sequence[Phase], second: Sequence[Phase], cores: int) -> float:
    """Seconds of both loops if each runs whenever it can. The loop that has the trainer trains to the end of its phase;
    of two that come at once, the first loop does."""
    one, other = _cells(first), _cells(second)
    row = column = 0
    seconds = 0.0
    second_has_trainer = False
    while row < len(one) and column < len(other):
        mine, theirs = one[row], other[column]
        if mine.trains and theirs.trains:
            row, column = (row, column + 1) if second_has_trainer else (row + 1, column)
            seconds += CELL_S
            continue
        second_has_trainer = theirs.trains
        seconds += _both(mine, theirs, cores)
        row, column = row + 1, column + 1
    return seconds + CELL_S * (len(one) - row + len(other) - column)


def _cells(phases: Sequence[Phase]) -> list[Phase]:
    """The phase of each CELL_S of a loop's chain."""
    cells: list[Phase] = []
    end = 0.0
    for phase in phases:
        end += phase.seconds
        cells += [phase] * (round(end / CELL_S) - len(cells))
    return cells


def _both(mine: Phase, theirs: Phase, cores: int) -> float:
    """Seconds in which both loops come one cell further at the same time."""
    if mine.trains and theirs.trains:
        return 2 * CELL_S
    return CELL_S * max(1.0, (mine.cores + theirs.cores) / cores, mine.vllm + theirs.vllm)


def phases(
    sample_s: Sequence[float], train_s: Sequence[float], trainer_cpu_s: float, vllm_cpu_s: float, cpu_s: float
) -> list[Phase]:
    """The phases of a loop from its steps alone. `trainer_cpu_s`, `vllm_cpu_s`: CPU seconds of these two threads.
    `cpu_s`: those of all processes. What the trainer's thread does not take belongs to sampling."""
    training, sampling = sum(train_s), sum(sample_s)
    train = Phase(0.0, trainer_cpu_s / training, True)
    sample = Phase(0.0, (cpu_s - trainer_cpu_s) / sampling, False, min(1.0, vllm_cpu_s / sampling))
    pairs = zip(sample_s, train_s, strict=True)
    return [phase for one, other in pairs for phase in (replace(sample, seconds=one), replace(train, seconds=other))]
