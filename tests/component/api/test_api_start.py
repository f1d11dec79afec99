"""The start of an API process: building opens nothing, and a start that fails closes what it has opened."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path

import pytest
from api_harness import BASE
from sqlalchemy import text

from skyrl.api.server import open_services
from skyrl.base.config.loading import load_config
from skyrl.runtime.processes.runtime import Runtime
from skyrl.storage.db.database import Database
from skyrl.storage.db.faults import DatabaseError
from tests.postgres_server import ON_BOTH

BUILD = """
import sys
from pathlib import Path

from skyrl.api.access import Tokens
from skyrl.api.services import Services
from skyrl.api.signed_links import SignedUrls
from skyrl.base.config.server import ServerConfig
from skyrl.inference.features import InferenceFeatures
from skyrl.runtime.processes.runtime import Runtime

OPENING = ("open", "os.listdir", "os.mkdir", "os.scandir", "socket.__new__", "sqlite3.connect", "subprocess.Popen",
           "_thread.start_new_thread")
seen = []
directory = Path(sys.argv[1])
runtime = Runtime(ServerConfig(base_model="acme/base", state_dir=directory / "state"), directory, None, None)
state, features = runtime.config.state_dir, InferenceFeatures(False, False, False)
parts = runtime, Tokens.open(state), SignedUrls.open(state, None), [features]
Services(*parts)  # imports what is imported late
sys.addaudithook(lambda event, given: seen.append((event, given)) if event in OPENING else None)
Services(*parts)
print(*seen, sep="\\n", end="")
"""


def test_building_an_api_process_opens_no_file_no_socket_and_no_thread(tmp_path: Path) -> None:
    ran = subprocess.run([sys.executable, "-c", BUILD, str(tmp_path)], capture_output=True, text=True, check=True)
    assert ran.stdout == ""


@ON_BOTH
@pytest.mark.parametrize("missing", ["api_keys", "api_processes"], ids=["first read", "first write"])
async def test_a_start_that_fails_closes_what_it_has_opened(tmp_path: Path, migrated_url: str, missing: str) -> None:
    with closing(Database(migrated_url)) as database:
        database.write(lambda c: c.execute(text(f"DROP TABLE {missing}")))
    config = load_config({"base_model": BASE, "state_dir": tmp_path, "database_url": migrated_url})
    open_before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(DatabaseError, match=missing):
        async with open_services(Runtime(config, tmp_path, None, "key")):
            pass
    assert "group-commit" not in {thread.name for thread in threading.enumerate()}
    assert set(os.listdir("/proc/self/fd")) <= open_before  # garbage of an earlier test may have been closed meanwhile
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".sock")]
