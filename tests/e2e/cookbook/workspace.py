"""A directory in which tinker-cookbook's recipes run without network, the files that a run writes, and the programs
that it asks meanwhile.

The recipes are unmodified; each runs in its own process. This file does not know the expected results of a recipe."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx

from skyrl.runtime.processes.supervision import dies_with_parent
from tests.cookbook.record import Shown, keep
from tests.environments import ROOT
from tests.sdk_programs import TRACED, succeeded

from ..conftest import ALIAS

KEY = "tml-cookbook"
TIME_BOUND_S = 900.0
QUESTIONS = ["How are you?", "Where is the fox?", "What does the owl do?", "Is it cold today?"]
PLACES = ["river", "mill", "bridge", "garden"]
NAME_THEIR_OWN = frozenset({"vlm_classifier.train"})
"""Recipes that write into a directory with a name of their choice, below the one that they are told."""
OPTIONS = {
    "vlm_classifier.train": ("model_name={}", "experiment_dir=runs/{}"),
    "preference.rlhf.rlhf_pipeline": ("base_model={}", "short_name={}"),
    "sdft.run_continual_learning": ("model_name={}", "log_root=runs/{}"),
}
"""How to give a recipe its model and its directory, where that is not `model_name=` and `log_path=`."""


@dataclass(frozen=True)
class Run:
    """The files that a recipe wrote."""

    directory: Path
    """What the recipe was told to write its logs to."""
    recipe: str
    commands: tuple[str, ...] = ()
    """What a user would type: the server, then the recipe."""
    seconds: float = 0.0
    """How long the recipe ran; 0 until it has ended."""

    @property
    def path(self) -> Path:
        """The log directory."""
        made = list(self.directory.glob("*/")) if self.recipe in NAME_THEIR_OWN else []
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

    @property
    def command(self) -> str:
        """What a user types to run the recipe."""
        return self.commands[-1]

    @property
    def as_start(self) -> str:
        """The option by which another recipe starts at the run's final checkpoint."""
        return f"load_checkpoint_path={self.checkpoints[-1]['state_path']}"

    def shows(
        self,
        outcome: str,
        *,
        data: str = "",
        before: Sequence[str] = (),
        instead: Mapping[str, str] | None = None,
        **figures: Sequence[float],
    ) -> None:
        """Keep the run for docs/cookbook.md, if the tests run for it. Call it after the test's assertions.

        `outcome`: a clause such as "the reward rises". `data`: the files that the recipe reads and what is in them.
        `before`: commands between the server's and the recipe's. `instead`: parts of the recipe's command, such as a
        port, by what the page has in their place. `figures`: what was measured, one number or one for each step."""
        server, recipe = self.commands
        for part, public in (instead or {}).items():
            recipe = recipe.replace(part, public)
        measured = {name.replace("_", " "): list(numbers) for name, numbers in figures.items()}
        commands = [server, *before, recipe]
        keep(self.directory.name, Shown(self.recipe, commands, data, outcome, self.seconds, measured))


class Workspace:
    """Model and data sets in relative directories with the names of their hub ids, where the cookbook looks first."""

    def __init__(
        self,
        root: Path,
        python: Path,
        url: str,
        model: Path,
        names: Sequence[str] = (ALIAS,),
        serve: str = "",
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """`model`: the directory that the server serves as each of `names`. `serve`: what a user types to serve the
        same; one model under the name that the recipe is given, unless given. `variables`: more of the environment."""
        self.root = root
        self._model, self._serve = names[0], serve
        self.python = python
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
                "PYTHONPATH": str(ROOT),
            }
            | dict(variables or {})
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

    def taught(self, lesson: str, name: str, *options: str, learning_rate: str = "1e-2") -> Run:
        """Train the model with `chat_sl` on `lessons/<lesson>.jsonl` (lessons.py), so that the recipe of reinforcement
        learning that goes on from there, in the same directory or from the checkpoint, has different rewards."""
        learns = (f"dataset=lessons/{lesson}.jsonl", f"learning_rate={learning_rate}", "renderer_name=qwen3_instruct")
        return self.run("chat_sl.train", name, *learns, *options)

    def start(
        self,
        recipe: str,
        name: str,
        *options: str,
        model: str | None = None,
        program: str = "",
        variables: Mapping[str, str] | None = None,
    ) -> tuple[Run, subprocess.Popen[bytes]]:
        """Start the recipe's process; its log directory is `runs/<name>`, its output goes to `runs/<name>.log`.
        `model`: the first of the workspace's names unless given. `program`: the module that starts the recipe; the
        recipe itself unless given. `variables`: more of its environment."""
        named, told = OPTIONS.get(recipe, ("model_name={}", "log_path=runs/{}"))
        fixed = (named.format(model or self._model), told.format(name))
        arguments = ["-m", program or f"tinker_cookbook.recipes.{recipe}", *fixed, *options]
        commands = (self._serve or serve_command(model or self._model), _public(["python", *arguments], self.root))
        run = Run(self.root / "runs" / name, recipe, commands)
        run.directory.parent.mkdir(exist_ok=True)
        command = dies_with_parent([str(self.python), *arguments])
        with run.output.open("ab") as log:
            process = subprocess.Popen(
                command, cwd=self.root, env=self._env | dict(variables or {}), stdout=log, stderr=subprocess.STDOUT
            )
        return run, process

    def run(
        self,
        recipe: str,
        name: str,
        *options: str,
        model: str | None = None,
        program: str = "",
        variables: Mapping[str, str] | None = None,
        fails: bool = False,
    ) -> Run:
        """Run the recipe to its end. Raises AssertionError unless it succeeds in time (or, with `fails`, fails)."""
        begin = time.monotonic()
        run, process = self.start(recipe, name, *options, model=model, program=program, variables=variables)
        try:
            code = process.wait(TIME_BOUND_S)
        finally:
            process.kill()
        assert code != 0 if fails else succeeded(code, run.log), f"{code}: {run.log[-3000:]}"
        return replace(run, seconds=time.monotonic() - begin)

    def script(self, code: str, *arguments: str) -> None:
        """Run Python code in the cookbook's environment. Raises AssertionError if it fails."""
        self._run("-c", code, *arguments)

    def program(self, module: str, *arguments: str) -> None:
        """Run a module of the tests likewise."""
        self._run("-m", module, *arguments)

    def _run(self, *arguments: str) -> None:
        command = dies_with_parent([str(self.python), *arguments])
        done = subprocess.run(
            command, cwd=self.root, env=self._env, capture_output=True, text=True, timeout=TIME_BOUND_S, check=False
        )
        assert succeeded(done.returncode, done.stderr), f"{done.returncode}: {done.stderr[-3000:]}"


def serve_command(*names: str) -> str:
    """What a user types to serve one model under these names."""
    command = ["skyrl", "serve", "--base-model", f"/models/{names[0].rpartition('/')[2]}"]
    for name in names:
        command += ["--served-model-name", name]
    return shlex.join(command)


def serve_several(trained: str, *sampled: str) -> str:
    """What a user types to serve one model that trains, and others that are only sampled from."""
    entries = [
        {"base_model": f"/models/{name.rpartition('/')[2]}", "served_model_names": [name]}
        | ({} if name == trained else {"uses": ["sample"]})
        for name in (trained, *sampled)
    ]
    return shlex.join(["skyrl", "serve", "--base-models", json.dumps(entries)])


def _public(command: Sequence[str], root: Path) -> str:
    """The command as a user types it in the workspace's directory, with a name in place of a checkpoint's ids."""
    text = shlex.join(command).replace(f"{root}/", "")
    return re.sub(r"tinker://[^/]+(?=/)", "tinker://RUN", text)


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


START_S = 60.0


@contextmanager
def service(command: Sequence[str], url: str, log: Path) -> Iterator[None]:
    """Run the command; inside, `url` answers. Raises AssertionError with the command's output if it does not."""
    with log.open("wb") as file:
        process = subprocess.Popen(dies_with_parent(command), stdout=file, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + START_S
        while not _answers(url):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        yield
    finally:
        process.terminate()
        process.wait()


def _answers(url: str) -> bool:
    """Whether an HTTP server is there, whatever it says."""
    try:
        httpx.get(url, trust_env=False)
    except httpx.TransportError:
        return False
    return True
