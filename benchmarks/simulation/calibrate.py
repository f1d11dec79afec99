"""Measures the CPU time of each step on the real parts: `python -m benchmarks.simulation.calibrate`.

The database's steps run alone, in groups of 1 and of MANY. The event loop's steps, the other processes and the cost of
a wake-up come from one server with one API process (`whole_samples`). All figures are CPU seconds. On a busy machine
they are larger, because others use its caches, and `crowded` is wrong: measure on a quiet one. `calibration_s` says how
fast the machine was.
Writes `benchmarks/results/cluster-services.json`.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import asdict, fields

import uvloop

from benchmarks.calibration import calibrate
from benchmarks.machine import facts
from benchmarks.simulation.database_steps import DatabaseSteps
from benchmarks.simulation.real import postgres_pid
from benchmarks.simulation.services import FILE, Cost, Services
from benchmarks.simulation.whole_samples import whole_samples
from skyrl.base.types.requests import Command, Kind
from skyrl.engine.scheduler import Scheduler
from skyrl.storage.db.database import Database
from skyrl.storage.db.migrate import migrate
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
        scheduler.take_exclusive(ready[:1])
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


def slice_s() -> float:
    """The kernel's time slice in seconds: how long one of two busy processes runs on a core before the other does."""
    core = min(os.sched_getaffinity(0))
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    for process in [_busy(1.0, core) for _ in range(2)]:
        process.wait()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return spent / (after.ru_nivcsw - before.ru_nivcsw)


def crowded() -> float:
    """How many times as much CPU the fixed work of the calibration takes while the other cores are busy. On a machine
    that other programs keep busy it is near 1, which is wrong."""
    alone = calibrate()
    own, *others = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, [own])
    busy = [_busy(3.0, core) for core in others]
    time.sleep(1)
    beside = calibrate()
    for process in busy:
        process.wait()
    os.sched_setaffinity(0, [own, *others])
    return beside / alone


def _busy(seconds: float, core: int) -> subprocess.Popen[bytes]:
    """A process that does the work of the calibration on this core, for so many CPU seconds."""
    imports = "import os, time; from benchmarks.calibration import calibrate"
    spin = f"while time.process_time() < {seconds}: calibrate()"
    program = f"{imports}; os.sched_setaffinity(0, [{core}])\n{spin}"
    return subprocess.Popen([sys.executable, "-c", program])


def main() -> None:
    before = calibrate()
    found = database_steps()
    found |= {"slice": Cost(slice_s()), "crowded": Cost(max(1.0, crowded()))}
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
