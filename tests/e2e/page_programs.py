"""Runs `skyrl`, `tinker` and the scripts of the pages without importing all packages for each command.

One process imports the packages once, which takes seconds. For each command it forks, and the child runs the program's
own entry point with the caller's arguments, directory, variables and standard streams. A client is one line of shell.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

LARGEST_REQUEST = 1 << 20

CLIENT = """
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as programs:
    programs.connect(sys.argv[1])
    request = {"program": sys.argv[2], "arguments": sys.argv[3:], "cwd": os.getcwd(), "variables": dict(os.environ)}
    socket.send_fds(programs, [json.dumps(request).encode()], [0, 1, 2])
    programs.shutdown(socket.SHUT_WR)
    sys.exit(int(programs.recv(16) or b"1"))
"""


def _skyrl() -> None:
    """The real command, except that `skyrl serve` stops where it would start the server."""
    from skyrl.cli.launcher import main as launcher
    from skyrl.cli.main import main

    launcher.serve = lambda config: print("the configuration is good")
    main()


def _tinker() -> None:
    from tinker.cli.__main__ import main

    main()


def _script() -> None:
    runpy.run_path(sys.argv[1], run_name="__main__")


PROGRAMS: dict[str, Callable[[], None]] = {"skyrl": _skyrl, "tinker": _tinker, "script": _script}

IMPORTED = (
    "numpy",
    "psycopg",
    "torch",
    "transformers",
    "tinker.cli.__main__",
    "skyrl.api.access",
    "skyrl.cli.doctor",
    "skyrl.cli.main",
    "skyrl.storage.db.maintenance",
    "skyrl.storage.db.migrate",
    "skyrl.storage.db.quotas",
    "skyrl.storage.db.maintenance",
    "skyrl.cli.launcher.main",
    "skyrl.sampling.quota_account",
    "skyrl.base.tiny.corpus",
)


def command(address: Path, program: str) -> list[str]:
    """The words that run `program`; the program's arguments follow."""
    return [sys.executable, "-S", "-E", str(address.with_suffix(".py")), str(address), program]


@contextlib.contextmanager
def running(directory: Path) -> Iterator[Path]:
    """The address that runs programs until the block ends."""
    address = directory / "programs"
    address.with_suffix(".py").write_text(CLIENT)
    process = subprocess.Popen(
        [sys.executable, "-m", __name__, str(address)], stdout=subprocess.PIPE, start_new_session=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield address
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def _serve(address: str) -> None:
    for name in IMPORTED:
        importlib.import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no process waits for the children
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        print("ready", flush=True)
        while True:
            connection, _ = listener.accept()
            with connection:
                if os.fork() == 0:
                    listener.close()
                    _run(connection)


def _run(connection: socket.socket) -> None:
    """In the child: run what the client requests, and answer with the exit code."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    first, streams, _, _ = socket.recv_fds(connection, LARGEST_REQUEST, 3)
    with connection.makefile("rb") as rest:
        request = json.loads(first + rest.read())
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115 (open to the end)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["variables"])
    sys.argv = [request["program"], *request["arguments"]]
    code = _code_of(PROGRAMS[request["program"]])
    sys.stdout.flush()
    sys.stderr.flush()
    connection.sendall(str(code).encode())
    os._exit(code)


def _code_of(program: Callable[[], None]) -> int:
    try:
        program()
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    _serve(sys.argv[1])
