"""The cookbook's self-distillation: the base model sees an example before the question, and teaches what it then says.

The example lets the tiny model say something else, not something right: the test asks whether the student takes it up.
"""

from __future__ import annotations

import pytest
from transformers import PreTrainedTokenizerBase

from skyrl.base.tiny.corpus import chat_prompt
from skyrl.cli.demo.server import DemoServer

from ..conftest import ALIAS, ClientFactory, greedy
from . import tasks
from .agreement import assert_agree
from .conftest import Stored, assert_final_is_kept
from .likelihood import logprob
from .workspace import KEY, PLACES, Run, Workspace

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(3000)]

DATA = (
    "`hicai-zju/SciKnowEval/test.jsonl`: rows with `question`, `choices`, `answerKey`, `domain`, `details` and `type`"
)
LEARNS = ("groups_per_batch=16", "max_tokens=16", "lora_rank=32", "max_steps=6", "eval_every=0")
LETTERS = "ABCD"
QUESTION = "Where is the {}?"
CHOICES = "\n".join(f"{letter}: {place}" for letter, place in zip(LETTERS, PLACES, strict=True))
ASKED = (
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
    run = exam.run("sdft.train", "sdft", *LEARNS, "learning_rate=3e-3")
    asked = ASKED.format(tasks.ANIMALS[0])
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
    run = exam.run("sdft.train", "sdft-reverse", *LEARNS, "learning_rate=3e-3", "reverse=True")
    apart = run.column("sdft/reverse_kl_mean")
    assert apart[-1] < 0.75 * apart[0]
    difference = assert_agree(run, server.url, tokenizer.encode(chat_prompt(ASKED.format(tasks.ANIMALS[0]))))
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
