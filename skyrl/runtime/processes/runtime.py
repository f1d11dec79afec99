"""How the launcher hands the configuration to the processes that it starts: one JSON file, and environment variables
for what differs between API processes."""

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

from skyrl.base.config.loading import dump_config, restore_config
from skyrl.base.config.server import ConfigError, ServerConfig
from skyrl.base.config.several import base_models_of
from skyrl.runtime.processes.logs import LogFormat, formatter
from skyrl.runtime.processes.startup import CANNOT_START, MARK, MAY_START, NotLoaded

logger = logging.getLogger(__name__)

RUNTIME_ENV = "SKYRL_RUNTIME_FILE"
SLOT_ENV = "SKYRL_API_SLOT"
"""The number of an API process within its server: 0, 1, ..."""
BASE_MODEL_ENV = "SKYRL_BASE_MODEL_NUMBER"
"""The number of the base model (`BaseModelSlot.number`) to which a process belongs; unset for API processes."""
SIDECAR_ENV = "SKYRL_SIDECAR_NUMBER"
"""The number of a sidecar, and of its vLLM, within its server: 0, 1, ..."""
PLACED = "placed.json"
"""The file in `Runtime.directory` in which the placement process of a plane says what each of its vLLMs does."""
SOCKETS_ENV = "SKYRL_API_SOCKETS"
"""The file descriptors of the sockets from which an API process accepts connections."""


@dataclass(frozen=True)
class Runtime:
    """The configuration of a process. `directory` is private, has a short path, and holds the sockets of the doorbells.
    `inference_url` is where samples go: the vLLM that the launcher runs, or the router in front of several; None if the
    launcher runs none. `replica_urls` are the addresses of all vLLMs behind it; `sidecar_urls` those of their sidecars,
    in the same order, if there are any. `ray_address` is HOST:PORT of the Ray cluster that is used; None if none is. A
    cluster that the launcher starts is waited for `ray_patience_s`. `cuda`: the vLLMs run on GPUs, of this machine or
    of the cluster.

    Only API processes have a `slot`, and descriptors of sockets to accept connections from (`listening`).

    A server with several base models has a runtime for each, in `base_models`; then this one has no addresses. A
    process of one base model gets the runtime of that base model alone."""

    config: ServerConfig
    directory: Path
    inference_url: str | None
    inference_api_key: str | None
    server_id: str = "server"
    replica_urls: tuple[str, ...] = ()
    ray_address: str | None = None
    ray_patience_s: float = 0.0
    cuda: bool = False
    sidecar_urls: tuple[str, ...] = ()
    slot: int = 0
    listening: tuple[int, ...] = ()
    base_models: tuple[Runtime, ...] = ()

    @property
    def each(self) -> tuple[Runtime, ...]:
        """The runtime of each base model, in the order of the configuration."""
        return self.base_models or (self,)

    @property
    def process_id(self) -> str:
        """The name of an API process in the database. A restarted process has the same slot and the same name."""
        return f"{self.server_id}/{self.slot}"

    @property
    def placement_owner(self) -> str:
        """The owner of the rows that say where this base model's vLLMs run on a Ray cluster."""
        name = self.config.role.name
        return f"{self.server_id}/{name}" if name else self.server_id

    @property
    def api_doorbell(self) -> Path:
        return self.api_doorbells[self.slot]

    @property
    def api_doorbells(self) -> list[Path]:
        """The doorbells of all API processes of the server, by slot."""
        return [self.directory / f"api-{slot}.sock" for slot in range(self.config.api_processes)]

    @property
    def metrics_directory(self) -> Path:
        """Where the server's processes publish their metrics."""
        return self.directory / "metrics"

    @property
    def engine_doorbell(self) -> Path:
        """The doorbell of this base model's engine."""
        return self.directory / (f"engine-{self.config.role.number}.sock" if self.config.role.name else "engine.sock")

    @property
    def engine_doorbells(self) -> list[Path]:
        """The doorbells of all engines of the server."""
        return [runtime.engine_doorbell for runtime in self.each]

    @classmethod
    def of_several(cls, config: ServerConfig, base_models: tuple[Runtime, ...]) -> Runtime:
        """The runtime of a server with these base models."""
        first = base_models[0]
        return cls(
            config,
            first.directory,
            inference_url=None,
            inference_api_key=None,
            server_id=first.server_id,
            ray_address=first.ray_address,
            ray_patience_s=first.ray_patience_s,
            base_models=base_models,
        )

    def write(self) -> Path:
        """Write the file that the processes read, with mode 0600. Returns its path, which is the value of
        RUNTIME_ENV."""
        file = self.directory / "runtime.json"
        values = {
            "config": json.loads(dump_config(self.config)),
            "server_id": self.server_id,
            "ray_address": self.ray_address,
            "ray_patience_s": self.ray_patience_s,
            "each": [
                {
                    "inference_url": runtime.inference_url,
                    "inference_api_key": runtime.inference_api_key,
                    "replica_urls": runtime.replica_urls,
                    "cuda": runtime.cuda,
                    "sidecar_urls": runtime.sidecar_urls,
                }
                for runtime in self.each
            ],
        }
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as stream:
            json.dump(values, stream)
        return file

    def restore(self) -> None:
        """Make the directory and the file again for a process that is restarted: somebody may have cleaned /tmp.

        Raises OSError, among others when another user has made a directory of that name.
        """
        with suppress(FileExistsError):
            self.directory.mkdir(0o700)
        if self.directory.lstat().st_uid != os.geteuid():
            raise PermissionError(f"{self.directory} is another user's")
        self.directory.chmod(0o700)
        self.write()

    @classmethod
    def from_environment(cls) -> Runtime:
        """The runtime of this process: of its base model, or of the server if it belongs to no base model."""
        file = Path(os.environ[RUNTIME_ENV])
        values = json.loads(file.read_text())
        config = restore_config(json.dumps(values["config"]))
        of_all = {
            "directory": file.parent,
            "server_id": values["server_id"],
            "ray_address": values["ray_address"],
            "ray_patience_s": values["ray_patience_s"],
            "slot": int(os.environ.get(SLOT_ENV, "0")),
            "listening": tuple(int(number) for number in os.environ.get(SOCKETS_ENV, "").split(",") if number),
        }
        each = tuple(
            cls(
                config=part,
                inference_url=own["inference_url"],
                inference_api_key=own["inference_api_key"],
                replica_urls=tuple(own["replica_urls"]),
                cuda=own["cuda"],
                sidecar_urls=tuple(own["sidecar_urls"]),
                **of_all,
            )
            for part, own in zip(base_models_of(config), values["each"], strict=True)
        )
        if (number := os.environ.get(BASE_MODEL_ENV)) is not None:
            return each[int(number)]
        if len(each) == 1 and not config.base_models:
            return each[0]
        return cls(config=config, inference_url=None, inference_api_key=None, base_models=each, **of_all)


def run_process(name: str, run: Callable[[], None], outage: Callable[[Exception], str | None]) -> None:
    """Run a process to its end. If the configuration is wrong, the model cannot be loaded, or the database is away, the
    process logs one line without a traceback. Its exit code tells the launcher whether another start could help
    (`skyrl.runtime.processes.startup`). `outage` gives the reason if an error means that the database is away, and None
    if not.
    """
    try:
        run()
    except ConfigError as error:
        logger.critical("%s%s", MARK, " ".join(str(error).split()))
        sys.exit(CANNOT_START)
    except NotLoaded as error:
        logger.critical("%s%s", MARK, " ".join(str(error).split()))
        sys.exit(MAY_START)
    except Exception as error:  # raised again, unless `outage` has a sentence for it
        away = outage(error)
        if away is None:
            raise
        logger.error("%s has ended because %s", name, away)
        sys.exit(1)


def set_up_process(log_level: str, log_format: LogFormat = "text", process: str = "launcher") -> None:
    """Log to stderr under the name `process`, and raise the limit of open files to the system's maximum: clients hold
    thousands of polls open."""
    handler = logging.StreamHandler()
    handler.setFormatter(formatter(log_format, process))
    logging.basicConfig(level=log_level.upper(), handlers=[handler], force=True)
    for noisy in ("httpx", "httpcore", "alembic"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
