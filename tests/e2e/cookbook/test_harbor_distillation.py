"""The cookbook's distillation over several turns: a student has a shell, and its teacher is only sampled from.

The recipe's sandboxes are containers in a cloud unless it is given others: here each is a directory of this machine.
"""

from __future__ import annotations

import pytest

from ..conftest import ALIAS
from . import tasks
from .agreement import AGREE, divergence
from .conftest import CHATS, Stored, assert_final_is_kept
from .workspace import Workspace

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(3000)]

TASKS = "small-tasks"
STEPS = 5


def test_a_student_with_a_shell_comes_nearer_to_its_teacher(tools: Workspace, stored: Stored) -> None:
    for number in range(4 * STEPS):
        directory = tools.root / ".cache/harbor/tasks" / TASKS / f"task-{number}"
        (directory / "environment").mkdir(parents=True)
        (directory / "task.toml").write_text('version = "1.0"\n')
        (directory / "instruction.md").write_text(tasks.instruction(tasks.ANIMALS[number % len(tasks.ANIMALS)]))
    student = tools.run("chat_sl.train", "harbor-student", *CHATS, "max_steps=4")
    given = (f"task_name={TASKS}", "sandbox_factory=harbor_local:new_directory", f"teacher_model={ALIAS}")
    sizes = ("groups_per_batch=4", "group_size=4", "max_turns=2", "max_tokens=16", "max_trajectory_tokens=2048")
    learns = ("learning_rate=3e-3", f"max_steps={STEPS}")
    recipe = "distillation.on_policy_distillation_harbor_multi_turn"
    run = tools.run(recipe, "harbor-distilled", *given, *sizes, *learns, student.as_start)
    assert [abs(step) < AGREE for step in divergence(run)] == [True] * STEPS
    apart = run.column("teacher_kl")
    assert apart[0] > 0.3
    assert apart[-1] < 0.7 * apart[0]
    assert_final_is_kept(run, stored)
    run.shows(
        "sampler and trainer agree; the divergence from the teacher falls",
        data=f"`~/.cache/harbor/tasks/{TASKS}`: a directory for each task, in Harbor's layout",
        before=[student.command, "export PYTHONPATH=examples/cookbook"],
        nats_from_the_teacher=apart,
        divergence=divergence(run),
    )
