"""`tinker_cookbook.recipes.harbor_rl` with tasks from a directory and without a cloud: a sandbox is a directory.

    export PYTHONPATH=examples/cookbook
    python -m harbor_local tasks=tasks model_name=…

The recipe's own sandboxes are containers in Modal's cloud. It takes others by its documented `sandbox_factory`. Here a
command runs as a process of this machine, in a new directory, with the task's `environment/` copied into it (its
`Dockerfile` is not built). This is no security boundary: a command can read and write whatever you can. Try tasks of
your own with it. Terminal-Bench's tasks need the images that their Dockerfiles describe.

Harbor's absolute paths, `/tests`, `/logs`, `/root` and `/app`, lie in that directory: where a command or a file that
Harbor writes names one of them, the directory's path is put before it.
"""

# pyright: reportMissingImports=false
# ruff: noqa: ASYNC109 (the cookbook's protocol of a sandbox has these parameters)

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import sys
import tempfile
import tomllib
from pathlib import Path

import chz
from tinker_cookbook.recipes.harbor_rl.harbor_env import HarborTask
from tinker_cookbook.recipes.harbor_rl.train import CLIConfig, cli_main
from tinker_cookbook.sandbox.sandbox_interface import SandboxResult

OUTPUT = 128 * 2**10
"""Bytes of a command's output, and likewise of its errors, that are returned unless the caller says another number."""
TIMED_OUT = 124
HARBORS = re.compile(r"(?<![\w./-])/(tests|logs|root|app)\b")


class Directory:
    """A sandbox: the directory `root`, which is deleted at its end."""

    def __init__(self, environment: Path) -> None:
        """`environment`: the task's directory whose files the sandbox begins with."""
        self.root = Path(tempfile.mkdtemp(prefix="harbor-")).resolve()
        for name in ("tests", "logs", "root", "app"):
            (self.root / name).mkdir()
        if environment.is_dir():
            shutil.copytree(environment, self.root / "app", dirs_exist_ok=True)

    @property
    def sandbox_id(self) -> str:
        return self.root.name

    async def send_heartbeat(self, timeout: int = 30) -> None:
        pass

    async def run_command(
        self, command: str, workdir: str | None = None, timeout: int = 60, max_output_bytes: int | None = None
    ) -> SandboxResult:
        """Run the command with bash. The working directory is `/app` unless given, also for Harbor's `/`."""
        directory = self._inside("/app" if workdir in (None, "/") else workdir)
        process = await asyncio.create_subprocess_exec(
            *("bash", "-c", self._mapped(command)),
            cwd=directory,
            env={"PATH": os.environ["PATH"], "HOME": str(self.root / "root")},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        try:
            output, errors = await asyncio.wait_for(process.communicate(), timeout)
        except TimeoutError:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
            return SandboxResult(stdout="", stderr=f"no end after {timeout} s", exit_code=TIMED_OUT)
        most = max_output_bytes or OUTPUT
        said = [stream[:most].decode(errors="replace") for stream in (output, errors)]
        return SandboxResult(stdout=said[0], stderr=said[1], exit_code=process.returncode or 0)

    async def read_file(self, path: str, max_bytes: int | None = None, timeout: int = 60) -> SandboxResult:
        try:
            content = self._inside(path).read_bytes()[:max_bytes]
        except OSError as error:
            return SandboxResult(stdout="", stderr=str(error), exit_code=1)
        return SandboxResult(stdout=content.decode(errors="replace"), stderr="", exit_code=0)

    async def write_file(
        self, path: str, content: str | bytes, executable: bool = False, timeout: int = 60
    ) -> SandboxResult:
        file = self._inside(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(self._mapped(content).encode() if isinstance(content, str) else content)
        file.chmod(0o755 if executable else 0o644)
        return SandboxResult(stdout="", stderr="", exit_code=0)

    async def cleanup(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)

    def _inside(self, path: str) -> Path:
        return self.root / path.lstrip("/")

    def _mapped(self, text: str) -> str:
        return HARBORS.sub(rf"{self.root}/\1", text)


async def new_directory(environment: Path, timeout: int) -> Directory:
    """The recipe's `sandbox_factory`."""
    return Directory(environment)


def load_tasks(directory: Path) -> list[HarborTask]:
    """The tasks in Harbor's layout: one directory each, with `instruction.md`, `task.toml` and `tests/test.sh`."""
    return [
        HarborTask(
            path.name,
            (path / "instruction.md").read_text(),
            path,
            tomllib.loads((path / "task.toml").read_text()),
        )
        for path in sorted(directory.iterdir())
        if path.is_dir()
    ]


if __name__ == "__main__":
    given = [argument for argument in sys.argv[1:] if not argument.startswith("tasks=")]
    (tasks,) = [argument.partition("=")[2] for argument in sys.argv[1:] if argument.startswith("tasks=")]
    config = chz.Blueprint(CLIConfig).make_from_argv(given)
    asyncio.run(cli_main(config, load_tasks(Path(tasks)), sandbox_factory=new_directory))
