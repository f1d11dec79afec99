"""The cookbook's recipes for `gsm8k`. The model has learned how to write a number, and then learns which one."""

from __future__ import annotations

import shutil

import pytest
from transformers import PreTrainedTokenizerBase

from skyrl.base.tiny.corpus import chat_prompt
from skyrl.cli.demo.server import DemoServer

from ..conftest import ALIAS
from . import tasks
from .agreement import AGREE, assert_agree, assert_rises, divergence
from .conftest import Stored, assert_final_is_kept
from .workspace import Run, Workspace

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(3000)]

DATA = "`openai/gsm8k`, configuration `main`: rows with `question`, and `answer` that ends in `#### 3`"
LEARNS = ("max_tokens=12", "learning_rate=7e-4", "max_steps=12")
BUILDER = {
    "dataset_builder": "tinker_cookbook.recipes.math_rl.math_env:Gsm8kDatasetBuilder",
    "dataset_builder.batch_size": "4",
    "dataset_builder.group_size": "8",
    "dataset_builder.model_name_for_tokenizer": ALIAS,
    "dataset_builder.renderer_name": "qwen3_instruct",
}
"""`rl_basic` has no option for the sizes of a batch, so the command line gives the builder of the data anew."""


@pytest.fixture(scope="module")
def lesson(tools: Workspace) -> Run:
    asked = [
        {"question": tasks.number_question(animal), "answer": f"We count.\n#### {tasks.NUMBER}"}
        for animal in tasks.ANIMALS
    ]
    directory = tools.root / "openai" / "gsm8k"
    for split, copies in (("train", 16), ("test", 1)):
        tasks.write_rows(directory / "main" / f"{split}.jsonl", asked * copies)
    tasks.write_configurations(directory, {"main": ["train", "test"]})
    return tools.taught("gsm8k", "gsm8k-lesson", "batch_size=8", "train_on_what=last_assistant_message")


def check(run: Run, lesson: Run, stored: Stored) -> None:
    """A run of the cookbook's own loop: sampler and trainer agree, and the right number becomes likelier."""
    assert [abs(step) < AGREE for step in divergence(run)] == [True] * 12
    correct = run.column("env/all/correct")
    assert_rises(correct, 0.25)
    assert_final_is_kept(run, stored)
    run.shows(
        "sampler and trainer agree; more answers are right",
        data=DATA,
        before=[lesson.command],
        right=correct,
        divergence=divergence(run),
    )


def test_math_rl_learns_from_gsm8k(tools: Workspace, lesson: Run, stored: Stored) -> None:
    sizes = ("env=gsm8k", "groups_per_batch=4", "group_size=8", "loss_fn=cispo", "eval_every=0")
    check(tools.run("math_rl.train", "gsm8k", *sizes, *LEARNS, lesson.as_start), lesson, stored)


def test_rl_basic_learns_from_gsm8k(tools: Workspace, lesson: Run, stored: Stored) -> None:
    builder = [f"{name}={value}" for name, value in BUILDER.items()]
    check(tools.run("rl_basic", "rl-basic", *builder, *LEARNS, lesson.as_start), lesson, stored)


def test_rl_loop_goes_on_from_the_checkpoint_in_its_directory_and_learns(
    tools: Workspace, lesson: Run, server: DemoServer, tokenizer: PreTrainedTokenizerBase
) -> None:
    shutil.copytree(lesson.directory, tools.root / "runs" / "rl-loop")
    run = tools.run("rl_loop", "rl-loop", "batch_size=4", "group_size=8", "loss_fn=cispo", *LEARNS)
    reward = run.column("reward/total")
    assert_rises(reward, 0.15)
    text = f"{chat_prompt(tasks.number_question('fox'))}\\boxed{{{tasks.NUMBER}}}"
    apart = assert_agree(run, server.url, tokenizer.encode(text))
    run.shows(
        "more answers are right; the final sampler and trainer agree",
        data=DATA,
        before=[lesson.command, "cp -r runs/gsm8k-lesson runs/rl-loop"],
        right=reward,
        difference=[apart],
    )
