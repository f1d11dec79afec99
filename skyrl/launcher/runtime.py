"""What the launcher hands to the processes that it starts: one JSON file, with the configuration and the sockets."""

from __future__ import annotations

import json
import logging
import os
import resource
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from skyrl.config.server import ConfigError, ServerConfig, dump_config, restore_config
from skyrl.db.faults import DatabaseError, is_transient, reason
from skyrl.processes.log_format import LineFormat
from skyrl.processes.startup import CANNOT_START, MARK, MAY_START, NotLoaded

logger = logging.getLogger(__name__)

RUNTIME_ENV = "SKYRL_RUNTIME_FILE"
SLOT_ENV = "SKYRL_API_SLOT"
"""Which of its server's API processes one is: 0, 1, ..."""
SOCKETS_ENV = "SKYRL_API_SOCKETS"
"""Numbers of the descriptors that it listens on."""


@dataclass(frozen=True)
class Runtime:
    """`directory` holds the sockets (short path, private); `inference_url` is the managed vLLM's, None without one.

    `slot` and `listening` (descriptors) are an API process's own."""

    config: ServerConfig
    directory: Path
    inference_url: str | None
    inference_api_key: str | None
    server_id: str = "server"
    slot: int = 0
    listening: tuple[int, ...] = ()

    @property
    def process_id(self) -> str:
        """An API process's name in the database, which its successor in the same slot has too."""
        return f"{self.server_id}/{self.slot}"

    @property
    def api_doorbell(self) -> Path:
        return self.api_doorbells[self.slot]

    @property
    def api_doorbells(self) -> list[Path]:
        """Of all API processes of the server."""
        return [self.directory / f"api-{slot}.sock" for slot in range(self.config.api_processes)]

    @property
    def engine_doorbell(self) -> Path:
        return self.directory / "engine.sock"

    def write(self) -> Path:
        """Store it where only this user can read it; returns the file for RUNTIME_ENV."""
        file = self.directory / "runtime.json"
        values = {
            "config": json.loads(dump_config(self.config)),
            "inference_url": self.inference_url,
            "inference_api_key": self.inference_api_key,
            "server_id": self.server_id,
        }
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as stream:
            json.dump(values, stream)
        return file

    def restore(self) -> None:
        """For processes that are started again: the directory may have been tidied away meanwhile, with all of /tmp.

        Raises OSError, also when somebody else has made one of that name.
        """
        with suppress(FileExistsError):
            self.directory.mkdir(0o700)
        if self.directory.lstat().st_uid != os.geteuid():
            raise PermissionError(f"{self.directory} is another user's")
        self.write()

    @classmethod
    def from_environment(cls) -> Runtime:
        file = Path(os.environ[RUNTIME_ENV])
        values = json.loads(file.read_text())
        return cls(
            restore_config(json.dumps(values["config"])),
            file.parent,
            values["inference_url"],
            values["inference_api_key"],
            values["server_id"],
            int(os.environ.get(SLOT_ENV, "0")),
            tuple(int(number) for number in os.environ.get(SOCKETS_ENV, "").split(",") if number),
        )


def run_process(name: str, run: Callable[[], None]) -> None:
    """Run a process to its end. An error that is not its own fault becomes one log line and an exit code instead of a
    traceback. The exit code tells the launcher whether another start could help (`skyrl.processes.startup`): it could
    when the database cannot be used."""
    try:
        run()
    except ConfigError as error:
        logger.critical("%s%s", MARK, " ".join(str(error).split()))
        sys.exit(CANNOT_START)
    except NotLoaded as error:
        logger.critical("%s%s", MARK, " ".join(str(error).split()))
        sys.exit(MAY_START)
    except DatabaseError as error:
        if not is_transient(error):
            raise
        logger.error("%s has ended, for the database cannot be used: %s", name, reason(error))
        sys.exit(1)


def set_up_process(config: ServerConfig) -> None:
    """Logging to stderr, and as many file descriptors as the system lets us have (clients hold thousands of polls)."""
    handler = logging.StreamHandler()
    handler.setFormatter(LineFormat())
    logging.basicConfig(level=config.log_level.upper(), handlers=[handler], force=True)
    for noisy in ("httpx", "httpcore", "alembic"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
