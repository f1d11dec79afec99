"""The cookbook's recipes in which the model calls a tool, each with its tool on this machine.

The model first learns the form of a call and of an answer, with a colour or number at random (lessons.py). `code_rl`
grades a program of eleven tokens, and more programs become right. In the other two a call has some eighty tokens, which
must all be right: within a test's few steps the reward does not rise beyond its noise. There the tests ask that calls
run, that the model goes on from their results, and that answers are graded.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from statistics import fmean

import pytest

from skyrl.runtime.processes.ports import free_port
from tests.environments import ROOT

from . import tasks
from .agreement import AGREE, assert_rises, divergence
from .conftest import Stored, assert_final_is_kept
from .workspace import Run, Workspace, service

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(3000)]

EXAMPLES = ROOT / "examples" / "cookbook"
LESSON = ("batch_size=4", "lr_schedule=constant", "train_on_what=all_assistant_messages")
CALLS = ("learning_rate=1e-4", "max_steps=4", "max_tokens=96", "max_turns=2", "renderer_name=qwen3_instruct")
"""Of the recipes with two turns."""
TASKS = 8


def check(run: Run, stored: Stored, metric: str) -> list[float]:
    """Sampler and trainer agree, and some answers are right. Returns the share of those, for each step."""
    assert all(abs(step) < AGREE for step in divergence(run))
    assert_final_is_kept(run, stored)
    right = run.column(metric)
    assert max(right) > 0
    return right


def check_calls(run: Run) -> list[float]:
    """Many calls are understood: the model gets their result and goes on. Returns the turns of an episode."""
    turns = run.column("env/all/turns_per_episode")
    assert max(turns) > 1.25
    return turns


def test_code_rl_learns_from_programs_that_a_local_sandbox_runs(tools: Workspace, stored: Stored) -> None:
    directory = tools.root / "agentica-org" / "DeepCoder-Preview-Dataset"
    test = {"input": "", "output": f"{tasks.NUMBER}\n", "testtype": "stdin_stdout"}
    rows = [{"problem": tasks.problem(animal), "tests": json.dumps([test])} for animal in tasks.ANIMALS[:4]]
    splits = {"primeintellect": ["train"], "taco": ["train"], "lcbv5": ["train", "test"], "codeforces": ["test"]}
    for name, parts in splits.items():
        for part in parts:
            tasks.write_rows(directory / name / f"{part}.jsonl", rows)
    tasks.write_configurations(directory, splits)
    lesson = tools.taught("code_rl", "code-lesson", *LESSON, learning_rate="5e-3")
    sizes = ("groups_per_batch=2", "group_size=8", "max_tokens=24", "eval_every=0")
    learns = ("learning_rate=1e-3", "max_steps=6")
    port = free_port()
    url = f"http://127.0.0.1:{port}/run_code"
    command = [str(tools.python), str(EXAMPLES / "sandbox.py"), "--port", str(port)]
    with service(command, url, tools.root / "sandbox.log"):
        run = tools.run("code_rl.train", "code", lesson.as_start, *sizes, *learns, variables={"SANDBOX_URL": url})
    right = check(run, stored, "env/all/correct")
    assert_rises(right, 0.2)
    run.shows(
        "sampler and trainer agree; more programs pass their tests",
        data="`agentica-org/DeepCoder-Preview-Dataset`: rows with `problem` and `tests`",
        before=[lesson.command, "python examples/cookbook/sandbox.py --port 8080 &"],
        right=right,
        divergence=divergence(run),
    )


def write_task(directory: Path, animal: str) -> None:
    """One of Harbor's tasks: the test passes if the file names the right colour."""
    (directory / "environment").mkdir(parents=True)
    (directory / "environment" / "Dockerfile").write_text("FROM debian\n")
    (directory / "tests").mkdir()
    (directory / "tests" / "test.sh").write_text(
        f"grep -qx {tasks.COLOUR} /app/answer.txt; echo $((1 - $?)) > /logs/verifier/reward.txt\n"
    )
    (directory / "task.toml").write_text('version = "1.0"\n')
    (directory / "instruction.md").write_text(tasks.instruction(animal))


def test_harbor_rl_learns_from_commands_that_run_in_a_local_directory(tools: Workspace, stored: Stored) -> None:
    for number in range(TASKS):
        write_task(tools.root / "tasks" / f"task-{number}", tasks.ANIMALS[number % 4])
    lesson = tools.taught("harbor_rl", "harbor-lesson", *LESSON, learning_rate="5e-3")
    options = (lesson.as_start, "tasks=tasks", "groups_per_batch=2", "group_size=8", "eval_every=0", *CALLS)
    run = tools.run("harbor_rl.train", "harbor", *options, program="harbor_local")
    right = check(run, stored, "env/all/test_passed")
    run.shows(
        "sampler and trainer agree over a command and its result; some tasks pass their tests",
        data="`tasks`: a directory for each task, in Harbor's layout",
        before=[lesson.command, "export PYTHONPATH=examples/cookbook"],
        right_on_average=[fmean(right)],
        turns=check_calls(run),
        divergence=divergence(run),
    )


QUESTIONS = """
import sys
from pathlib import Path
import pandas as pd

folder = Path("~/.cache/tinker-cookbook/PeterJinGo/nq_hotpotqa_train/train").expanduser()
folder.mkdir(parents=True)
answer, *asked = sys.argv[1:]
rows = [{"question": each, "golden_answers": [answer], "data_source": "nq"} for each in asked]
pd.DataFrame(rows).to_parquet(folder / "train.parquet")
"""


def test_search_tool_learns_from_what_a_local_vector_database_finds(tools: Workspace, stored: Stored) -> None:
    tools.script(QUESTIONS, tasks.COLOUR, *(tasks.question(animal) for animal in tasks.ANIMALS[:4] * 2))
    tasks.write_rows(tools.root / "documents.jsonl", [{"text": tasks.document(animal)} for animal in tasks.ANIMALS])
    lesson = tools.taught("search_tool", "search", *LESSON, learning_rate="5e-3")
    embeds, chroma = free_port(), free_port()
    variables = {
        "GOOGLE_VERTEX_BASE_URL": f"http://127.0.0.1:{embeds}",
        "GOOGLE_APPLICATION_CREDENTIALS": "credentials.json",
        "GCP_VERTEXAI_PROJECT_NUMBER": "none",
        "GCP_VERTEXAI_REGION": "none",
    }
    shutil.copyfile(EXAMPLES / "credentials.json", tools.root / "credentials.json")
    program = str(EXAMPLES / "embeddings.py")
    embedding = [sys.executable, program, "serve", "--port", str(embeds)]
    database = [str(tools.python.parent / "chroma"), "run", "--path", str(tools.root / "documents")]
    database += ["--host", "localhost", "--port", str(chroma)]
    options = (
        "batch_size=2",
        "group_size=8",
        "n_results=1",
        *CALLS,
        f"chroma_port={chroma}",
        "behavior_if_log_dir_exists=resume",
    )
    with (
        service(embedding, variables["GOOGLE_VERTEX_BASE_URL"], tools.root / "embeddings.log"),
        service(database, f"http://localhost:{chroma}/api/v2/heartbeat", tools.root / "chroma.log"),
    ):
        tools.program("embeddings", "fill", "documents.jsonl", "--chroma-port", str(chroma))
        run = tools.run("search_tool.train", "search", *options, variables=variables)
    right = check(run, stored, "env/all/correct")
    public = {str(embeds): "8020", "credentials.json": "examples/cookbook/credentials.json"}
    given = " ".join(f"{name}={value}" for name, value in variables.items())
    for part, instead in public.items():
        given = given.replace(part, instead)
    run.shows(
        "sampler and trainer agree over a search and its result; some answers are right",
        data="`PeterJinGo/nq_hotpotqa_train`, below `~/.cache/tinker-cookbook`: `question` and `golden_answers`",
        before=[
            lesson.command,
            "python examples/cookbook/embeddings.py serve --port 8020 &",
            "chroma run --path documents --port 8010 &",
            "python examples/cookbook/embeddings.py fill documents.jsonl --chroma-port 8010",
            f"export {given}",
        ],
        instead={f"chroma_port={chroma}": "chroma_port=8010"},
        right_on_average=[fmean(right)],
        turns=check_calls(run),
        divergence=divergence(run),
    )
