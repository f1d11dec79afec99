"""Fills a database and a state directory with a catalogue of adapters, as a server leaves it after a week.

    python -P benchmarks/catalogue_rows.py URL STATE_DIR VERSIONS [--old N]

A tenant has 100 versions: five sessions with a model of 20 versions each, the last one active. A version has a
checkpoint, a sampling session, its directory, and its key in the checkpoint store; one in four has an ended sample.
Tenant 0 is that of the benchmarks' API key. With `--old` it adds instead N things that are to be deleted: samples and
sampling sessions whose time is over, expired checkpoints, and directories without a row.

Runs with the packages of the build whose schema it fills, so that two builds can be compared. Uses the tables alone:
no file has the contents of an adapter.
"""

from __future__ import annotations

import argparse
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, insert, text
from sqlmodel import SQLModel

from skyrl.api.access import tenant_of_key
from skyrl.base.types.weights import AdapterVersion, LoraSpec
from skyrl.storage.checkpoint_store.directories import safe_name
from skyrl.storage.checkpoint_store.versions import version_directory
from skyrl.storage.db.columns import lora_values
from skyrl.storage.db.database import Database
from skyrl.storage.db.migrate import migrate

KEY, BASE = "tml-bench", "tiny"
MODELS, EACH, STEPS = 5, 20, 4
"""Of a tenant: models; versions of a model, and steps of its history."""
SAMPLED = 4
"""One version of so many has a sample whose result is still kept."""
ROWS = 2_000
DAY_S = 86_400.0
LORA = lora_values(LoraSpec(rank=8, alpha=32.0, seed=1, train_attn=True, train_mlp=True, train_unembed=True))
Rows = dict[str, list[dict[str, Any]]]


def catalogue(versions: int, now: float) -> Iterator[tuple[Rows, list[tuple[AdapterVersion, str]]]]:
    """By table, the rows of one tenant after the other, and its versions with their keys in the checkpoint store."""
    for number in range(-(-versions // (MODELS * EACH))):
        tenant = tenant_of_key(f"{KEY}-{number}" if number else KEY)
        rows: Rows = {name: [] for name in TABLES}
        files: list[tuple[AdapterVersion, str]] = []
        key = {
            "id": f"{number:08d}",
            "digest": secrets.token_bytes(32),
            "tenant": tenant,
            "name": "",
            "scopes": ["train"],
        }
        rows["api_keys"].append(key | {"created_at": now})
        for model in range(MODELS):
            _model(rows, files, f"s{number:05d}x{model}", tenant, now - (MODELS - model) * 3600, model == MODELS - 1)
        yield rows, files


TABLES = ("api_keys", "sessions", "models", "checkpoints", "sampling_sessions", "futures", "usage", "run_steps")


def _model(rows: Rows, files: list[Any], session: str, tenant: str, at: float, active: bool) -> None:
    model_id, status = f"{session}:train:0", "active" if active else "finished"
    times = {"created_at": at, "heartbeat_at": time.time(), "ended_at": None if active else at}
    rows["sessions"].append(
        {"id": session, "tenant": tenant, "status": status, "sdk_version": "", "tags": [], "display_name": session}
        | times
    )
    own = {"tenant": tenant, "base_model": BASE, **LORA}
    rows["models"].append(
        {
            "id": model_id,
            "session_id": session,
            "model_seq_id": 0,
            "status": "closed",
            "sampler_version": EACH,
            "next_seq": 1,
        }
        | {"created_at": at, "last_request_at": at, "steps": STEPS, "user_metadata": {"name": session}}
        | own
    )
    sums = dict.fromkeys(("loss_sum", "gap_sum", "clipped_sum", "busy_s"), 1.0)
    sums |= dict.fromkeys(("passes", "tokens", "gap_tokens", "clipped_tokens"), 8)
    rows["run_steps"] += [
        {"model_id": model_id, "step": step + 1, "updated_at": at, "ended_at": at} | sums for step in range(STEPS)
    ]
    used = {"tenant": tenant, "session_id": session, "model_id": model_id, "base_model": BASE, "amount": 10.0}
    rows["usage"] += [
        {"bucket": int(at // 3600) * 3600, "kind": kind} | used for kind in ("training", "sampling_prefill")
    ]
    for each in range(1, EACH + 1):
        version = AdapterVersion.of(model_id, each)
        key = f"{safe_name(model_id)}/step-{each:04d}-{secrets.token_hex(6)}"
        files.append((version, key))
        rows["checkpoints"].append(checkpoint(version, key, at + each, own))
        rows["sampling_sessions"].append(sampler(session, each, version, tenant, at, None if active else at))
        if each % SAMPLED == 0:
            rows["futures"].append(sample(session, each, tenant, time.time() - 600 + each / 100))


def checkpoint(version: AdapterVersion, key: str, at: float, own: dict[str, Any]) -> dict[str, Any]:
    name = {"model_id": version.model_id, "kind": "sampler_weights", "name": f"step-{version.number:04d}"}
    return name | own | {"store_key": key, "weights": version, "size_bytes": 10**6, "public": False, "created_at": at}


def sampler(
    session: str, number: int, version: AdapterVersion, tenant: str, at: float, closed_at: float | None
) -> dict[str, Any]:
    own = {"id": f"{session}:sample:{number}", "session_id": session, "seq_id": number, "tenant": tenant}
    status = "active" if closed_at is None else "closed"
    times = {"created_at": at, "last_used_at": at, "closed_at": closed_at, "size_bytes": 10**6}
    return own | times | {"base_model": BASE, "weights": version, "status": status}


def sample(session: str, number: int, tenant: str, completed_at: float) -> dict[str, Any]:
    own = {"id": f"{session}-{number}", "tenant": tenant, "session_id": session, "sample_seq_id": number}
    own |= {"sampling_session_id": f"{session}:sample:0", "digest": b"d" * 16, "kind": "external", "status": "done"}
    own |= {"body": b"b" * 1500, "body_format": "json", "result": b"r" * 600, "result_format": "protobuf"}
    return own | {"created_at": completed_at, "completed_at": completed_at}


def old(count: int, now: float) -> tuple[Rows, list[tuple[AdapterVersion | None, str | None]]]:
    """Rows and files of `count` things to delete: 2 in 5 are samples, 2 in 5 sampling sessions."""
    own = {"tenant": tenant_of_key(KEY), "base_model": BASE, **LORA}
    ended = {"id": "sold", "status": "finished", "created_at": 0.0, "heartbeat_at": 0.0, "sdk_version": "", "tags": []}
    rows: Rows = {
        "sessions": [ended | {"tenant": own["tenant"]}],
        "futures": [],
        "sampling_sessions": [],
        "checkpoints": [],
    }
    files: list[tuple[AdapterVersion | None, str | None]] = []
    for number in range(1, 2 * count // 5 + 1):
        version = AdapterVersion.of("sold:train:0", number)
        rows["futures"].append(sample("sold", number, own["tenant"], now - 7200 + number / 100))
        closed_at = now - 2 * DAY_S + number / 100
        rows["sampling_sessions"].append(sampler("sold", number, version, own["tenant"], 0.0, closed_at))
        if number % 4 == 0:
            key = f"{safe_name(f'sold:train:{number % 100}')}/old-{number}-{secrets.token_hex(6)}"
            gone = {"expires_at": now - 60, "weights": None}
            rows["checkpoints"].append(checkpoint(version, key, now - DAY_S, own) | gone)
            files += [(version, None), (None, key)]
    return rows, files


def add(connection: Connection, rows: Rows) -> None:
    for name, values in rows.items():
        for start in range(0, len(values), ROWS):
            connection.execute(insert(SQLModel.metadata.tables[name]), values[start : start + ROWS])


def make(state_dir: Path, files: list[tuple[AdapterVersion | None, str | None]]) -> None:
    for version, key in files:
        for path in (version and version_directory(state_dir, version), key and state_dir / "checkpoints" / key):
            if path:
                os.makedirs(path)
                os.utime(path, (1.0, 1.0))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("state_dir", type=Path)
    parser.add_argument("versions", type=int)
    parser.add_argument("--old", type=int, default=0)
    given = parser.parse_args()
    now = time.time()
    with closing(Database(given.url)) as database:
        if given.old:
            rows, files = old(given.old, now)
            make(given.state_dir, files)
            database.write(lambda connection: add(connection, rows))
            return
        migrate(database)
        gathered: Rows = {name: [] for name in TABLES}
        for rows, files in catalogue(given.versions, now):
            make(given.state_dir, list(files))
            for name, values in rows.items():
                gathered[name] += values
        database.write(lambda connection: add(connection, gathered))
        if not database.is_sqlite:  # autovacuum does so on a real server
            with database.writer.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
                connection.execute(text("VACUUM ANALYZE"))


if __name__ == "__main__":
    main()
