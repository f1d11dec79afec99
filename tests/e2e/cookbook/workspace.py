"""A directory in which tinker-cookbook's recipes run without network, and the files that a run writes.

The recipes are unmodified; each runs in its own process. This file does not know the expected results of a recipe.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyrl.runtime.processes.supervision import dies_with_parent
from tests.sdk_programs import TRACED, succeeded

from ..conftest import ALIAS

KEY = "tml-cookbook"
TIME_BOUND_S = 900.0
QUESTIONS = ["How are you?", "Where is the fox?", "What does the owl do?", "Is it cold today?"]
PLACES = ["river", "mill", "bridge", "garden"]
NAME_THEIR_OWN = frozenset({"vlm_classifier.train"})
"""Recipes that write into a directory with a name of their choice, below the one that they are told."""


@dataclass(frozen=True)
class Run:
    """The files that a recipe wrote."""

    directory: Path
    """What the recipe was told to write its logs to."""
    names_its_own: bool = False
    """The recipe is one of NAME_THEIR_OWN."""

    @property
    def path(self) -> Path:
        """The log directory."""
        made = list(self.directory.glob("*/")) if self.names_its_own else []
        return made[0] if made else self.directory

    @property
    def output(self) -> Path:
        """The file with what the recipe's process printed."""
        return self.directory.with_suffix(".log")

    @property
    def log(self) -> str:
        return self.output.read_text()

    def column(self, metric: str) -> list[Any]:
        """The metric's values in the order of writing, from the rows that have the metric."""
        return [row[metric] for row in _rows(self.path / "metrics.jsonl") if metric in row]

    @property
    def checkpoints(self) -> list[dict[str, Any]]:
        """The recipe's own record of its checkpoints, oldest first; empty before the first."""
        return list(_rows(self.path / "checkpoints.jsonl"))

    @property
    def training_run(self) -> str:
        """The server's id of the last model that the recipe trained."""
        return str(self.checkpoints[-1]["state_path"]).split("/")[2]


class Workspace:
    """Model and data sets in relative directories with the names of their hub ids, where the cookbook looks first."""

    def __init__(self, root: Path, python: Path, url: str, model: Path, names: Sequence[str] = (ALIAS,)) -> None:
        """`model`: the directory that the server serves as each of `names`."""
        self.root = root
        self._model = names[0]
        self._python = python
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        self._env = (
            kept
            | TRACED
            | {
                "TINKER_BASE_URL": url,
                "TINKER_API_KEY": KEY,
                "HF_HOME": str(root / "huggingface"),
                "HF_HUB_OFFLINE": "1",
                "HF_DATASETS_OFFLINE": "1",
                "WANDB_MODE": "disabled",
                "OMP_NUM_THREADS": "1",
            }
        )
        for name in names:
            shutil.copytree(model, root / name)
        chats, preferences = [], []
        for question in QUESTIONS:
            for place in PLACES:
                good, bad = f"The old fox watches the {place}.", f"I will not talk about the {place}."
                turns = [{"role": "user", "content": question}, {"role": "assistant", "content": good}]
                chats.append({"messages": turns})
                asked = f"\n\nHuman: {question}\n\nAssistant: "
                preferences.append({"chosen": asked + good, "rejected": asked + bad})
        _write(root / "chats.jsonl", chats * 16)
        for split in ("train", "test"):
            _write(root / "Anthropic" / "hh-rlhf" / f"{split}.jsonl", preferences)

    def start(
        self, recipe: str, name: str, *options: str, model: str | None = None
    ) -> tuple[Run, subprocess.Popen[bytes]]:
        """Start the recipe's process; its log directory is `runs/<name>`, its output goes to `runs/<name>.log`.
        `model`: the first of the workspace's names unless given."""
        run = Run(self.root / "runs" / name, recipe in NAME_THEIR_OWN)
        run.directory.parent.mkdir(exist_ok=True)
        told = f"{'experiment_dir' if run.names_its_own else 'log_path'}={run.directory}"
        fixed = (f"model_name={model or self._model}", told)
        command = [str(self._python), "-m", f"tinker_cookbook.recipes.{recipe}", *fixed, *options]
        with run.output.open("ab") as log:
            process = subprocess.Popen(
                dies_with_parent(command), cwd=self.root, env=self._env, stdout=log, stderr=subprocess.STDOUT
            )
        return run, process

    def run(self, recipe: str, name: str, *options: str, model: str | None = None, fails: bool = False) -> Run:
        """Run the recipe to its end. Raises AssertionError unless it succeeds in time (or, with `fails`, fails)."""
        run, process = self.start(recipe, name, *options, model=model)
        try:
            code = process.wait(TIME_BOUND_S)
        finally:
            process.kill()
        assert code != 0 if fails else succeeded(code, run.log), f"{code}: {run.log[-3000:]}"
        return run

    def script(self, code: str, *arguments: str) -> None:
        """Run Python code in the cookbook's environment. Raises AssertionError if it fails."""
        command = dies_with_parent([str(self._python), "-c", code, *arguments])
        done = subprocess.run(
            command, cwd=self.root, env=self._env, capture_output=True, text=True, timeout=TIME_BOUND_S, check=False
        )
        assert succeeded(done.returncode, done.stderr), f"{done.returncode}: {done.stderr[-3000:]}"


def kill_after_checkpoint(run: Run, process: subprocess.Popen[bytes]) -> None:
    """Send SIGKILL as soon as the run has saved a checkpoint."""
    deadline = time.monotonic() + TIME_BOUND_S
    try:
        while not run.checkpoints:
            assert process.poll() is None, run.log[-3000:]
            assert time.monotonic() < deadline, run.log[-3000:]
            time.sleep(0.02)
    finally:
        process.kill()
        process.wait()


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    """The complete lines of the file: the writer may be in the middle of a line."""
    text = path.read_text() if path.is_file() else ""
    return (json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines())


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
