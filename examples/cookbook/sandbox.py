"""A sandbox for `tinker_cookbook.recipes.code_rl` without Docker: it runs each program as a process with limits.

    python examples/cookbook/sandbox.py --port 8080

This is no security boundary. A program runs as the user who started the sandbox: it can read that user's files and use
the network. The limits stop accidents: endless loops, much memory, large files. Run it in a container, or only programs
that you would run by hand. The recipe's own sandbox, SandboxFusion, has the isolation that this one lacks.

It answers `POST /run_code` as SandboxFusion does. The program gets this Python's packages (the recipe's checks import
numpy), an empty environment, and a directory of its own with the files of the request. Knows nothing of the recipe.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import IO, Any

MEMORY = 2 * 2**30
FILE_SIZE = 16 * 2**20
OPEN_FILES = 64
"""What a process may have at most: bytes of address space, bytes of a file, open files."""
OUTPUT = 64 * 2**10
"""Bytes of the program's output, and likewise of its errors, that are returned."""
LONGEST_S = 600.0
LIMITED = """
import os, resource, sys
for name, most in zip(("AS", "FSIZE", "NOFILE", "CORE", "CPU"), map(int, sys.argv[1:6])):
    resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (most, most))
os.execv(sys.executable, [sys.executable, sys.argv[6]])
"""
"""Sets its own limits, which the program inherits, and becomes the program."""


@dataclass(frozen=True)
class Ran:
    """How a program ended, in SandboxFusion's words."""

    status: str
    """`Finished` or `TimeLimitExceeded`."""
    execution_time: float
    return_code: int | None
    stdout: str
    stderr: str


def run(code: str, files: dict[str, bytes], timeout_s: float) -> Ran:
    """Run Python `code` in a new directory with these files. Raises ValueError for a file outside the directory."""
    timeout_s = min(timeout_s, LONGEST_S)
    limits = [str(most) for most in (MEMORY, FILE_SIZE, OPEN_FILES, 0, int(timeout_s) + 1)]
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name).resolve()
        for path, content in {**files, "main.py": code.encode()}.items():
            file = (directory / path).resolve()
            if directory not in file.parents:
                raise ValueError(f"{path}: outside the program's directory")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
        begin = time.monotonic()
        # The output goes to files, whose size has a limit.
        with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
            process = subprocess.Popen(
                [sys.executable, "-c", LIMITED, *limits, "main.py"],
                cwd=directory,
                env={"PATH": os.defpath, "HOME": str(directory), "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                start_new_session=True,
            )
            try:
                process.wait(timeout_s)
                status = "Finished"
            except subprocess.TimeoutExpired:
                status = "TimeLimitExceeded"
            finally:
                _end_group(process)
            took = time.monotonic() - begin
            said = [_beginning(file) for file in (output, errors)]
    return Ran(status, took, process.returncode, *said)


def _beginning(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read(OUTPUT).decode(errors="replace")


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End the program and what it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """The answer to the body of a `POST /run_code`."""
    if (language := request.get("language")) != "python":
        return {"status": "SandboxError", "message": f"{language}: this sandbox runs python alone"}
    files = {name: base64.b64decode(content) for name, content in (request.get("files") or {}).items()}
    try:
        ran = run(request["code"], files, float(request.get("run_timeout") or 10))
    except ValueError as error:
        return {"status": "SandboxError", "message": str(error)}
    well = ran.status == "Finished" and ran.return_code == 0
    return {"status": "Success" if well else "Failed", "message": "", "run_result": asdict(ran)}


class Handler(BaseHTTPRequestHandler):
    """Answers `POST /run_code`."""

    def do_POST(self) -> None:
        if self.path != "/run_code":
            self.send_error(404)
            return
        body = self.rfile.read(int(self.headers["Content-Length"]))
        said = json.dumps(answer(json.loads(body))).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description="Run programs for code_rl. No security boundary.")
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--host", default="127.0.0.1")
    given = parser.parse_args()
    with ThreadingHTTPServer((given.host, given.port), Handler) as server:
        print(f"runs programs for http://{given.host}:{server.server_port}/run_code", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main()
