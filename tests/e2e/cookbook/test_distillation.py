"""The cookbook's distillation on the real server: a student learns from teachers that are only sampled from.

The student begins at a checkpoint, four steps away from the teachers, so that it has something to learn.
"""

from __future__ import annotations

import pytest

from ..conftest import ALIAS, SECOND_ALIAS
from . import tasks
from .agreement import AGREE, divergence
from .conftest import CHATS, Stored, assert_final_is_kept
from .workspace import PLACES, QUESTIONS, Run, Workspace

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(3000)]

LEARNS = ("group_size=4", "max_tokens=16", "learning_rate=3e-3", "lora_rank=32", "max_steps=6")
PROMPTS = "`allenai/tulu-3-sft-mixture`: rows with `messages`"
PROBLEMS = "`zwhe99/DeepMath-103K`: rows with `question`"
REASONING = "`open-thoughts/OpenThoughts3-1.2M`: rows with `conversations`, each turn with `from` and `value`"
ASKED = [f"Tell me about the {place}." for place in PLACES]
THOUGHTS = [f"So the {place} is old, and the owl likes it." for place in PLACES]


@pytest.fixture(scope="module")
def school(two_models: Workspace) -> Workspace:
    """With prompts for students, and with what a teacher thought about some of them."""
    prompts = [{"messages": [{"role": "user", "content": asked}]} for asked in ASKED]
    tasks.write_rows(two_models.root / "allenai/tulu-3-sft-mixture/train.jsonl", prompts * 64)
    problems = [{"question": question} for question in QUESTIONS]
    tasks.write_rows(two_models.root / "zwhe99/DeepMath-103K/train.jsonl", problems * 64)
    traces = [
        {"conversations": [{"from": "human", "value": asked}, {"from": "gpt", "value": thought}]}
        for asked, thought in zip(ASKED, THOUGHTS, strict=True)
    ]
    tasks.write_rows(two_models.root / "open-thoughts/OpenThoughts3-1.2M/train.jsonl", traces * 64)
    return two_models


@pytest.fixture(scope="module")
def student(school: Workspace) -> Run:
    return school.run("chat_sl.train", "student", *CHATS, "max_steps=4")


def assert_agrees(run: Run) -> None:
    assert [abs(step) < AGREE for step in divergence(run)] == [True] * 6


def test_a_student_comes_nearer_to_its_teacher(school: Workspace, student: Run, stored: Stored) -> None:
    teacher = (f"teacher_model={SECOND_ALIAS}", "dataset=deepmath", "groups_per_batch=8")
    run = school.run("distillation.on_policy_distillation", "distilled", *teacher, *LEARNS, student.as_start)
    assert_agrees(run)
    apart = run.column("teacher_kl")
    assert apart[0] > 1.0
    assert apart[-1] < 0.6 * apart[0]
    assert_final_is_kept(run, stored)
    run.shows(
        "sampler and trainer agree; the divergence from a teacher that is only sampled from falls",
        data=PROBLEMS,
        before=[student.command],
        nats_from_the_teacher=apart,
        divergence=divergence(run),
    )


def test_a_model_learns_from_what_a_teacher_thought(school: Workspace, stored: Stored) -> None:
    shape = ("renderer_name=qwen3_instruct", "batch_size=4", "max_length=256", "lora_rank=32")
    sizes = ("buffer_size=64", "max_prompts=256", "learning_rate=1e-2", "max_steps=6")
    run = school.run("distillation.off_policy_reasoning", "off-policy-reasoning", *shape, *sizes)
    loss = run.column("train_mean_nll")
    assert loss[-1] < 0.5 * loss[0]
    assert_final_is_kept(run, stored)
    run.shows("the loss falls", data=REASONING, loss=loss)


def test_a_student_comes_nearer_to_the_teacher_of_each_data_set(
    school: Workspace, student: Run, stored: Stored
) -> None:
    teachers = (f"deepmath_teacher_model={SECOND_ALIAS}", f"tulu3_teacher_model={ALIAS}")
    sizes = ("deepmath_groups_per_batch=4", "tulu3_groups_per_batch=4")
    run = school.run(
        "distillation.on_policy_multi_teacher", "taught-by-two", *teachers, *sizes, *LEARNS, student.as_start
    )
    assert_agrees(run)
    apart = [run.column(f"teacher_kl/dataset_{number}") for number in (0, 1)]
    for teacher in apart:
        assert teacher[0] > 0.5
        assert teacher[-1] < 0.6 * teacher[0]
    assert_final_is_kept(run, stored)
    run.shows(
        "sampler and trainer agree; the divergence from both teachers falls",
        data=f"{PROBLEMS}; {PROMPTS}",
        before=[student.command],
        nats_from_the_first_teacher=apart[0],
        nats_from_the_second_teacher=apart[1],
        divergence=divergence(run),
    )
