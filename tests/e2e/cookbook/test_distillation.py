"""The cookbook's distillation on the real server: a student learns from teachers that are only sampled from, also over
several turns with a shell, and from itself.

The student begins at a checkpoint, four steps away from the teachers, so that it has something to learn."""

from __future__ import annotations

import pytest
from transformers import PreTrainedTokenizerBase

from skyrl.base.tiny.corpus import chat_prompt
from skyrl.cli.demo.server import DemoServer

from ..conftest import ALIAS, SECOND_ALIAS, ClientFactory, greedy
from . import tasks
from .agreement import AGREE, assert_agree, divergence, logprob
from .conftest import CHATS, Stored, assert_final_is_kept
from .workspace import KEY, PLACES, QUESTIONS, Run, Workspace

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


DATA = (
    "`hicai-zju/SciKnowEval/test.jsonl`: rows with `question`, `choices`, `answerKey`, `domain`, `details` and `type`"
)
DISTILLS = ("groups_per_batch=16", "max_tokens=16", "lora_rank=32", "max_steps=6", "eval_every=0")
LETTERS = "ABCD"
QUESTION = "Where is the {}?"
CHOICES = "\n".join(f"{letter}: {place}" for letter, place in zip(LETTERS, PLACES, strict=True))
STUDENT_ASKED = (
    f"{QUESTION}\n\n{CHOICES}\nPlease reason step by step, then give your answer as <answer>X</answer> where X is the "
    "letter of the correct option."
)
"""As the recipe asks the student."""
SHOWN = (
    "{}\n\nThis is an example for a response to the question:\n{}\n\n"
    "Now answer with a response of your own, including the thinking process."
)
"""As the recipe asks the teacher: the question, then an example."""

STAGES = ("stage1_sft_lr3e-03", "stage2_sft_lr3e-03")
ARROW = """
from pathlib import Path
from datasets import load_dataset

for file in Path("sdft").rglob("*.jsonl"):
    load_dataset("json", data_files=str(file), split="train").save_to_disk(str(file.with_suffix("")))
"""
"""`run_continual_learning` reads directories in the form in which `datasets` saves them."""


@pytest.fixture(scope="module")
def exam(workspace: Workspace) -> Workspace:
    """With questions of which each has four choices."""
    rows = [
        {
            "question": QUESTION.format(animal),
            "choices": {"label": list(LETTERS), "text": PLACES},
            "answerKey": LETTERS[number % 4],
            "domain": "Chemistry",
            "details": {"level": "L3"},
            "type": "mcq-4-choices",
        }
        for number, animal in enumerate(tasks.ANIMALS)
    ]
    tasks.write_rows(workspace.root / "hicai-zju/SciKnowEval/test.jsonl", rows * 16)
    return workspace


def test_the_student_says_without_the_example_what_the_teacher_says_with_it(
    exam: Workspace,
    server: DemoServer,
    connect: ClientFactory,
    tokenizer: PreTrainedTokenizerBase,
    stored: Stored,
) -> None:
    run = exam.run("sdft.train", "sdft", *DISTILLS, "learning_rate=3e-3")
    asked = STUDENT_ASKED.format(tasks.ANIMALS[0])
    prompt, shown = (tokenizer.encode(chat_prompt(text)) for text in (asked, SHOWN.format(asked, LETTERS[0])))
    service = connect(KEY)
    base = service.create_sampling_client(base_model=ALIAS).result()
    student = service.create_sampling_client(model_path=run.checkpoints[-1]["sampler_path"]).result()
    answer = greedy(base, shown, max_tokens=10)
    assert greedy(base, prompt, max_tokens=10) != answer
    before, after = logprob(base, prompt, answer), logprob(student, prompt, answer)
    assert after > before + 5
    apart = assert_agree(run, server.url, prompt + answer)
    assert_final_is_kept(run, stored)
    run.shows(
        "the teacher's answer becomes likelier; the final sampler and trainer agree",
        data=DATA,
        logprob_of_the_answer=[before, after],
        difference=[apart],
    )


def test_the_reverse_divergence_from_the_teacher_falls(
    exam: Workspace, server: DemoServer, tokenizer: PreTrainedTokenizerBase, stored: Stored
) -> None:
    run = exam.run("sdft.train", "sdft-reverse", *DISTILLS, "learning_rate=3e-3", "reverse=True")
    apart = run.column("sdft/reverse_kl_mean")
    assert apart[-1] < 0.75 * apart[0]
    difference = assert_agree(run, server.url, tokenizer.encode(chat_prompt(STUDENT_ASKED.format(tasks.ANIMALS[0]))))
    assert_final_is_kept(run, stored)
    run.shows(
        "the divergence from the teacher falls; the final sampler and trainer agree",
        data=DATA,
        nats_from_the_teacher=apart,
        difference=[difference],
    )


def test_two_skills_are_learned_one_after_the_other(
    workspace: Workspace, server: DemoServer, tokenizer: PreTrainedTokenizerBase
) -> None:
    """By supervised training, with which the recipe compares self-distillation."""
    asked = [QUESTION.format(animal) for animal in tasks.ANIMALS]
    call = {
        "golden_response": ["Action: find", "It is here."],
        "golden_answer": [{"Action": "find", "Action_Input": "{}"}],
    }
    called = [{"prompt": question, **call} for question in asked]
    answer = "<reasoning>\nIt is old.\n</reasoning>\n<answer>\nA\n</answer>"
    turns = [[{"role": "user", "content": f"What is the {place}?"}] for place in PLACES]
    reasoned = [{"messages": each, "prompt": each, "output_text": answer, "answer": "A"} for each in turns]
    for folder, rows in (("tooluse_data", called), ("science_data", reasoned * 2)):
        for split in ("train_data", "eval_data"):
            tasks.write_rows(workspace.root / "sdft" / folder / f"{split}.jsonl", rows * 8)
    workspace.script(ARROW)
    options = ("methods=sft", "learning_rates=3e-3", "batch_size=8", "max_tokens=256", "lora_rank=32", "data_dir=sdft")
    run = workspace.run("sdft.run_continual_learning", "skills", *options)
    stages = [Run(run.directory / name, run.recipe) for name in STAGES]
    losses = [stage.column("train_mean_nll") for stage in stages]
    assert all(loss[-1] < 0.7 * loss[0] for loss in losses)
    assert stages[0].checkpoints[-1]["state_path"] in (stages[1].path / "config.json").read_text()
    text = tokenizer.encode(chat_prompt(asked[0]) + "It is here.")
    differences = [assert_agree(stage, server.url, text) for stage in stages]
    run.shows(
        "the loss of both stages falls, the second from the first's checkpoint; final samplers and trainers agree",
        data="`sdft/tooluse_data`, `sdft/science_data`: `train_data` and `eval_data` of the paper, saved by `datasets`",
        loss_of_the_first_stage=losses[0],
        loss_of_the_second_stage=losses[1],
        difference=differences,
    )
