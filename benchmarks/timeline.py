"""What each of two tenants' RL loops does at each moment of a run, from the server's own traces.

Usage: python -m benchmarks.timeline [--steps N] [--print N]

A real `skyrl serve` as in `benchmarks.tenants` sends all its spans here. A tenant

- trains while the engine runs one of its passes or optimizer steps,
- saves while the engine writes its weights and vLLM loads them,
- samples while the API forwards one of its samples,
- queues while a command of it waits in the engine and nothing else of it runs,
- is away if the server has nothing of it: its client computes, or a request or an answer is on its way.

Prints the share of each for every tenant, then how long both were in which states, and with `--print` the first
intervals. Only queueing and what is between the states can be a wait of the server's own. On a busy machine all
intervals are longer, most of all those that compute.
"""

from __future__ import annotations

import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from benchmarks import program
from benchmarks.collector import Collector, Span
from benchmarks.table import aligned
from benchmarks.tenants import TWO, Scene, line
from skyrl.cli.demo.rl import Settings

SENT_S = 7.0
"""Spans are sent every five seconds."""
STATES = {
    ("engine", "run", "FORWARD_BACKWARD"): "trains",
    ("engine", "run", "OPTIM_STEP"): "trains",
    ("engine", "run", "SAVE_WEIGHTS_FOR_SAMPLER"): "saves",
    ("api-0", "forward", "EXTERNAL"): "samples",
    ("engine", "queue", "FORWARD_BACKWARD"): "queues",
    ("engine", "queue", "OPTIM_STEP"): "queues",
    ("engine", "queue", "SAVE_WEIGHTS_FOR_SAMPLER"): "queues",
}
"""By process, span and kind of the command."""
ORDER = ("trains", "saves", "samples", "queues", "away")
"""Of several states at once, the first counts."""


class Interval(NamedTuple):
    """Seconds since the epoch."""

    began: float
    ended: float
    state: str


def intervals(spans: Sequence[Span]) -> list[list[Interval]]:
    """The intervals of each tenant, without gaps and without overlaps, from its first span to its last."""
    tenants: dict[bytes, str] = {}
    kinds: dict[bytes, str] = {}
    for span in spans:
        if (tenant := span.attributes.get("skyrl.tenant")) is not None:
            tenants[span.trace] = tenant
        if (kind := span.attributes.get("skyrl.kind")) is not None:
            kinds[span.trace] = kind
    found: defaultdict[str, list[Interval]] = defaultdict(list)
    for span in spans:
        state = STATES.get((span.process, span.name, kinds.get(span.trace, "")))
        if state is not None and span.trace in tenants:
            found[tenants[span.trace]].append(Interval(span.began, span.ended, state))
    return [_flat(found[tenant]) for tenant in sorted(found)]


def _flat(of_tenant: Sequence[Interval]) -> list[Interval]:
    """The same without overlaps: of several states at one moment the first in ORDER."""
    edges = sorted({edge for each in of_tenant for edge in (each.began, each.ended)})
    flat: list[Interval] = []
    for began, ended in zip(edges, edges[1:], strict=False):
        states = {each.state for each in of_tenant if each.began <= began and each.ended >= ended}
        state = next(state for state in ORDER if state in states or state == "away")
        if flat and flat[-1].state == state:
            flat[-1] = flat[-1]._replace(ended=ended)
        else:
            flat.append(Interval(began, ended, state))
    return flat


def shares(of_tenant: Sequence[Interval]) -> dict[str, float]:
    """The share of each state in the tenant's time."""
    whole = of_tenant[-1].ended - of_tenant[0].began
    return {state: sum(each.ended - each.began for each in of_tenant if each.state == state) / whole for state in ORDER}


def together(one: Sequence[Interval], other: Sequence[Interval]) -> dict[tuple[str, str], float]:
    """Seconds in which the two tenants were in each pair of states, while both ran. The order of a pair means
    nothing."""
    found: defaultdict[tuple[str, str], float] = defaultdict(float)
    for mine in one:
        for theirs in other:
            seconds = min(mine.ended, theirs.ended) - max(mine.began, theirs.began)
            if seconds > 0:
                first, second = sorted((mine.state, theirs.state), key=ORDER.index)
                found[first, second] += seconds
    return dict(found)


def text(tenants: Sequence[Sequence[Interval]]) -> str:
    lines = [["tenant", *ORDER]]
    for name, of_tenant in zip(TWO, tenants, strict=True):
        lines.append([name, *(f"{share:.0%}" for share in shares(of_tenant).values())])
    pairs = together(*tenants)
    whole = sum(pairs.values())
    most = sorted(pairs.items(), key=lambda pair: -pair[1])
    return "\n".join([aligned(lines), *(f"{' + '.join(pair):20} {seconds / whole:.0%}" for pair, seconds in most)])


def main() -> None:
    parser = program.parser("timeline", __doc__)
    parser.add_argument("--steps", type=int, default=12, help="steps of each tenant")
    parser.add_argument("--print", type=int, default=0, metavar="N", help="print the first N intervals of each tenant")
    options = parser.parse_args()
    with Collector() as collector, ExitStack() as stack:
        config = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "config.toml"
        config.write_text(f'otlp_endpoint = "{collector.url}"\ntrace_ratio = 1.0\n')
        scene = Scene(stack, TWO, flags=("--config", str(config)))
        time.sleep(SENT_S)
        collector.spans.clear()
        print(line(TWO, scene.run(TWO, Settings(steps=options.steps))))
        time.sleep(SENT_S)
        tenants = intervals(collector.spans)
    print(text(tenants))
    for name, of_tenant in zip(TWO, tenants, strict=True):
        for each in of_tenant[: options.print]:
            since_ms = (each.began - tenants[0][0].began) * 1e3
            print(f"{name} {since_ms:8.0f} ms {(each.ended - each.began) * 1e3:6.0f} ms {each.state}")


if __name__ == "__main__":
    main()
