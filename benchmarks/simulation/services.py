"""The CPU seconds of each step of a sample, as `calibrate` measured them on the real parts."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

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
    the settlement of so many commands; `idle` the periodic work of a process for one second."""

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
    router: Cost
    replica: Cost
    client: Cost


def load(file: Path = FILE, *, machine: float | None = None) -> Services:
    """With `machine`, the CPU seconds of the benchmarks' calibration now, all costs are scaled to this machine as it is
    now. Raises FileNotFoundError before the first calibration."""
    measured = json.loads(file.read_text())
    scale = 1.0 if machine is None else machine / measured["calibration_s"]
    scaled = {name: {part: scale * s for part, s in cost.items()} for name, cost in measured["services"].items()}
    return Services(**{name: Cost(**cost) for name, cost in scaled.items()})
