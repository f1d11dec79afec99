"""What the launcher hands to the processes that it starts: one JSON file, with the configuration and the sockets."""

from __future__ import annotations

import json
import logging
import os
import resource
from dataclasses import dataclass
from pathlib import Path

from skyrl.config import ServerConfig, dump_config, restore_config

RUNTIME_ENV = "SKYRL_RUNTIME_FILE"


@dataclass(frozen=True)
class Runtime:
    """`directory` holds the sockets (short path, private); `inference_url` is the managed vLLM's, None without one."""

    config: ServerConfig
    directory: Path
    inference_url: str | None
    inference_api_key: str | None

    @property
    def api_doorbell(self) -> Path:
        return self.directory / "api.sock"

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
        }
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as stream:
            json.dump(values, stream)
        return file

    @classmethod
    def from_environment(cls) -> Runtime:
        file = Path(os.environ[RUNTIME_ENV])
        values = json.loads(file.read_text())
        return cls(
            restore_config(json.dumps(values["config"])),
            file.parent,
            values["inference_url"],
            values["inference_api_key"],
        )


def set_up_process(config: ServerConfig) -> None:
    """Logging to stderr, and as many file descriptors as the system lets us have (clients hold thousands of polls)."""
    logging.basicConfig(
        level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True
    )
    for noisy in ("httpx", "httpcore", "alembic"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
