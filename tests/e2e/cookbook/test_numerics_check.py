"""The cookbook's check of reinforcement learning's numbers: a document is read with a tool, and words are counted.

The tiny model has learned the beginning of a call. Most of its calls are broken, each of which costs 0.1.
"""

from __future__ import annotations

import shutil
from random import Random

import pytest

from skyrl.base.tiny.corpus import paragraph

from ..conftest import ALIAS
from . import tasks
from .agreement import AGREE, divergence
from .conftest import Stored, assert_final_is_kept
from .workspace import Workspace

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(3000)]

CORPUS = "Salesforce/wikitext"
CONFIGURATION = "wikitext-103-raw-v1"
TASK = ("task.num_pages_min=2", "task.num_pages_max=2", "task.page_chars=60", "task.words=near")


def test_sampler_and_trainer_agree_and_fewer_calls_are_broken(workspace: Workspace, stored: Stored) -> None:
    rng = Random(7)
    lines = [{"text": f" {paragraph(rng, 1)} \n"} for _ in range(400)]
    tasks.write_rows(workspace.root / CORPUS / CONFIGURATION / "train.jsonl", lines)
    tasks.write_configurations(workspace.root / CORPUS, {CONFIGURATION: ["train"]})
    workspace.program("tests.e2e.cookbook.beginnings", ALIAS, "rl_numerics_check")
    lesson = workspace.taught(
        "rl_numerics_check", "rl_numerics_check-lesson", "batch_size=1", "max_length=2048", "max_steps=32"
    )
    shutil.copytree(lesson.directory, workspace.root / "runs" / "rl_numerics_check")
    resumes = ("behavior_if_log_dir_exists=resume", "renderer_name=qwen3_instruct")
    sizes = ("groups_per_batch=4", "group_size=8", "max_tokens=32", "learning_rate=3e-3", "max_steps=4")
    run = workspace.run("rl_numerics_check.train", "rl_numerics_check", *resumes, *TASK, *sizes)
    assert [abs(step) < AGREE for step in divergence(run)] == [True] * 4
    reward = run.column("env/all/reward/total")
    assert reward[0] < -0.02
    assert reward[-1] > reward[0] + 0.02
    assert_final_is_kept(run, stored)
    run.shows(
        "sampler and trainer agree after a prompt of 700 tokens; the reward rises",
        data=f"`{CORPUS}`, configuration `{CONFIGURATION}`: rows with `text`",
        before=[lesson.command, "cp -r runs/rl_numerics_check-lesson runs/rl_numerics_check"],
        reward=reward,
        divergence=divergence(run),
    )
