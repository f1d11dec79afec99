"""Measures the CPU time of each step on the real parts: `python -m benchmarks.simulation.calibrate`.

The database's steps run alone, in groups of 1 and of MANY. The event loop's steps are what is left of the CPU per
sample of one server with one API process. All figures are CPU seconds. On a busy machine they are larger, because
others use its caches: `calibration_s` says how fast the machine was.
Writes `benchmarks/results/cluster-services.json`.
"""

from __future__ import annotations

import json
import time
from contextlib import closing
from dataclasses import asdict, fields

import uvloop

from benchmarks.calibration import calibrate
from benchmarks.machine import facts
from benchmarks.processes import tree_seconds
from benchmarks.simulation.database_steps import DatabaseSteps
from benchmarks.simulation.real import cluster, postgres_pid
from benchmarks.simulation.services import FILE, Cost, Services
from skyrl.base.types.command import Command
from skyrl.base.types.kinds import Kind
from skyrl.storage.db.database import Database
from skyrl.storage.db.migrate import migrate
from skyrl.training.engine.scheduler import Scheduler
from tests.postgres_server import PostgresServer


async def _database_steps(bench: DatabaseSteps) -> dict[str, Cost]:
    recorded, settled, ids = await bench.commits()
    ends, one = await bench.reads(ids)
    sent, carried, heard = await bench.notices()
    looks = await bench.looks()
    read_rows, write_beats = await bench.first_beats()
    engine_commit = await bench.engine_commits()
    await bench.close()
    return {
        "record_api": recorded[0],
        "record_db": recorded[1],
        "settle_api": settled[0],
        "settle_db": settled[1],
        "read_ends_api": ends[0],
        "read_ends_db": ends[1],
        "read_one_api": one[0],
        "read_one_db": one[1],
        "notify_api": sent,
        "notify_db": carried,
        "hear_api": heard,
        "read_rows_api": read_rows[0],
        "read_rows_db": read_rows[1],
        "write_beats_api": write_beats[0],
        "write_beats_db": write_beats[1],
        "engine_commit": engine_commit[0],
        "engine_commit_db": engine_commit[1],
        "turn": engine_turn(),
    } | looks


def engine_turn() -> Cost:
    """Of the scheduler's work for a turn, by models that wait: what `Engine` asks it for in each turn."""
    few, many = _turn_s(10), _turn_s(1_000)
    each = (many - few) / 990
    return Cost(max(0.0, few - 10 * each), each)


def _turn_s(models: int) -> float:
    scheduler = Scheduler(1)
    for n in range(models):
        name = str(n)
        scheduler.add(Command(n, name, Kind.FORWARD_BACKWARD, name, name, name, 0, None, None, "json", 100))
    began = time.process_time()
    for _ in range(20):
        assert scheduler.has_work
        ready = scheduler.ready_models()
        scheduler.take_file_commands()
        assert scheduler.last_row
        assert scheduler.oldest is not None
        scheduler.take_barriers(ready[:1])
    return (time.process_time() - began) / 20


def database_steps() -> dict[str, Cost]:
    server = PostgresServer()
    try:
        server.start()
        name = server.new_database()
        url = server.url(name)
        with closing(Database(url)) as database:
            migrate(database)
            bench = DatabaseSteps(database, url.replace("+psycopg", ""), postgres_pid())
            return uvloop.run(_database_steps(bench))
    finally:
        server.remove()


SHARES = {"submit": 0.30, "forward": 0.15, "complete": 0.25, "retrieve": 0.20, "poll": 0.10}
"""How the event loop's work for a sample is dealt among its steps. The sum alone decides how many samples a process
can do; the shares only decide when in a sample's life it works."""


def whole_samples(found: dict[str, Cost]) -> dict[str, Cost]:
    """The event loop's steps: one server under load, less the database's steps and the idle work."""
    with cluster(1, 2, delay_ms=200) as real:
        groups = real.groups()
        before = tree_seconds(groups["api"][0])
        time.sleep(5)
        idle = (tree_seconds(groups["api"][0]) - before) / 5
        measured = real.load(64, 4, 10, tenants=8).result()
        commits = real.commits()
    cpu, rate, polls = measured["cpu_ms"], measured["samples_per_s"], measured["polls_per_sample"]
    groups_per_sample = commits["groups"] / commits["rows"] * 2
    database = found["record_api"].each + found["settle_api"].each + found["record_api"].base * groups_per_sample
    database += min(polls, 50 / rate) * found["read_ends_api"].base + found["read_ends_api"].each
    loop = max(0.0, cpu["api"] / 1e3 - idle / rate - database)
    steps = {name: Cost(share * loop) for name, share in SHARES.items()}
    steps["poll"] = Cost(steps["poll"].base / polls)
    return steps | {
        "idle": Cost(idle),
        "router": Cost(cpu["router"] / 1e3),
        "replica": Cost(cpu["replicas"] / 1e3),
        "client": Cost(cpu["clients"] / 1e3),
    }


def main() -> None:
    before = calibrate()
    found = database_steps()
    found |= whole_samples(found)
    machine = (before + calibrate()) / 2
    services = Services(**{field.name: found[field.name] for field in fields(Services)})
    command = "python -m benchmarks.simulation.calibrate"
    result = {"command": command, "facts": facts(), "calibration_s": machine, "services": asdict(services)}
    FILE.write_text(json.dumps(result, indent=1) + "\n")
    for name, cost in found.items():
        print(f"{name:14} {cost.base * 1e6:9.1f} µs  + {cost.each * 1e6:7.2f} µs each")


if __name__ == "__main__":
    main()
