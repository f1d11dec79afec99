"""The CPU seconds of each step of a sample, as `calibrate` measured them on the real parts."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

OF_KERNEL = ("slice", "crowded")
"""Not CPU seconds of work."""
FILE = Path(__file__).parents[1] / "results" / "cluster-services.json"


@dataclass(frozen=True)
class Cost:
    """A step that handles several rows, ids or listeners at once: `base` + `each` × their number, in CPU seconds."""

    base: float
    each: float = 0.0

    def of(self, count: float = 0.0) -> float:
        return self.base + self.each * count


@dataclass(frozen=True)
class Services:
    """CPU seconds. `x_api` is the part of an API process, `x_db` the part of PostgreSQL.

    `submit`, `forward`, `complete`, `poll` and `retrieve` are the event loop's work for a sample without the database;
    `record` and `settle` a group commit of so many rows; `read_ends` the read of new ends with so many rows, `read_one`
    that of one result which another process has settled; `notify` one notice to so many listeners, `hear` its receipt
    with so many ids; `beat` a heartbeat of a session, `look` a look at so many sessions and `compare` the comparison of
    all of them; `read_rows` the read of so many sessions that a process does not know, `write_beats` the group commit
    of so many heartbeats; `turn` the engine's choice among so many models, `engine_commit` its read of the bodies and
    the settlement of so many commands; `idle` the periodic work of a process without clients for one second.

    `router`, `replica` and `client` are the work of these processes for a sample. `x_wake` is what a wake-up of a
    thread that had nothing to do costs besides; of the database it is a backend. `slice` is the kernel's time slice in
    seconds, `crowded` how many times as much CPU the same work takes while all cores are busy."""

    submit: Cost
    forward: Cost
    complete: Cost
    poll: Cost
    retrieve: Cost
    record_api: Cost
    record_db: Cost
    settle_api: Cost
    settle_db: Cost
    read_ends_api: Cost
    read_ends_db: Cost
    read_one_api: Cost
    read_one_db: Cost
    notify_api: Cost
    notify_db: Cost
    hear_api: Cost
    beat: Cost
    look_api: Cost
    look_db: Cost
    compare_api: Cost
    compare_db: Cost
    read_rows_api: Cost
    read_rows_db: Cost
    write_beats_api: Cost
    write_beats_db: Cost
    turn: Cost
    engine_commit: Cost
    engine_commit_db: Cost
    idle: Cost
    idle_db: Cost
    router: Cost
    replica: Cost
    client: Cost
    api_wake: Cost
    database_wake: Cost
    router_wake: Cost
    replica_wake: Cost
    client_wake: Cost
    slice: Cost
    crowded: Cost


def load(file: Path = FILE, *, machine: float | None = None) -> Services:
    """With `machine`, the CPU seconds of the benchmarks' calibration now, all costs are scaled to this machine as it is
    now. Raises FileNotFoundError before the first calibration."""
    measured = json.loads(file.read_text())
    scale = 1.0 if machine is None else machine / measured["calibration_s"]
    costs = {name: Cost(**cost) for name, cost in measured["services"].items()}
    scaled = {name: Cost(scale * cost.base, scale * cost.each) for name, cost in costs.items()}
    return Services(**(scaled | {name: costs[name] for name in OF_KERNEL}))
