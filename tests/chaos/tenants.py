"""Starts the tenants' processes, waits for their reports, and ends them."""

from __future__ import annotations

import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Self

from skyrl.runtime.processes.supervision import dies_with_parent
from tests.chaos import journal
from tests.chaos.journal import Step
from tests.chaos.kinds import KINDS


class Tenant:
    """One process of `tests.chaos.tenant`, or of `tests.chaos.agents`."""

    def __init__(self, directory: Path, url: str, kind: str, seed: int, learning_rate: float) -> None:
        self.task = kind
        self.trains = KINDS[kind] is not None
        self.learning_rate = learning_rate
        self.seed = seed
        self.key = f"tml-chaos-{kind}"
        self.journal = directory / f"{kind}.jsonl"
        self.final = ""
        """The path of the final state, once the process has reported "done"."""
        self._log = directory / f"{kind}.log"
        self._reported: dict[str, threading.Event] = {"ready": threading.Event(), "done": threading.Event()}
        module = [sys.executable, "-m", "tests.chaos.tenant" if self.trains else "tests.chaos.agents"]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                dies_with_parent([*module, url, self.key, kind, *map(str, (seed, learning_rate, self.journal))]),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        self._reader = threading.Thread(target=self._read, name=f"tenant-{kind}", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            word, _, rest = line.strip().partition(" ")
            self.final = rest
            self._reported[word].set()

    def reports(self, word: str, within_s: float) -> bool:
        """Whether the process prints `word` in time and before it ends."""
        for _ in range(int(within_s * 10)):
            if self._reported[word].wait(0.1):
                return True
            if self._process.poll() is not None:
                self._reader.join()
                return self._reported[word].is_set()
        return False

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def steps(self) -> list[Step]:
        """Those in the journal so far."""
        return journal.read(self.journal) if self.journal.exists() else []

    def enough(self) -> None:
        """Tell the process to end after the step that runs."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write("enough\n")
            self._process.stdin.flush()

    def log_tail(self) -> str:
        return self._log.read_text()[-2000:]

    def end(self) -> None:
        """Close the stdin of the process, which then ends. Kill the process if it does not end within 60 s."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
