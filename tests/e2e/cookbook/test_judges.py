"""The cookbook's recipes whose reward is a judgement: of a reward model that has learned preferences, and of a judge on
the same server."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from skyrl.base.tiny import model_path
from skyrl.base.tiny.corpus import chat_prompt
from skyrl.cli.demo.server import DemoServer
from tests.environments import ROOT, environment
from tests.servers import ready

from ..conftest import ALIAS
from . import tasks
from .agreement import AGREE, assert_rises, divergence
from .conftest import Stored, assert_final_is_kept
from .judge import make_judge
from .workspace import PLACES, QUESTIONS, Run, Workspace, serve_command

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(3000)]

RECIPE = "preference.rlhf.rlhf_pipeline"
NAME = "feedback"
"""The recipe writes to `rlhf-<name>` in the directory of all runs, a folder for each stage."""
DATA = "`HuggingFaceH4/no_robots`: rows with `messages`; `Anthropic/hh-rlhf`: rows with `chosen` and `rejected`"
LIKED, DISLIKED = "The old fox watches the {}.", "I will not talk about the {}."
SIZES = ("batch_size=8", "max_length=256", "lora_rank=32")


@pytest.fixture
def people(server: DemoServer, tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """A workspace with conversations of both kinds, and with preferences between them."""
    root = tmp_path_factory.mktemp("people")
    python = environment(ROOT / "requirements" / "cookbook.txt")
    made = Workspace(root, python, server.url, model_path(), variables={"TINKER_COOKBOOK_RUNS_DIR": "runs"})
    asked = [(question, place) for question in QUESTIONS for place in PLACES]
    conversations = [
        {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer.format(place)}]}
        for question, place in asked
        for answer in (LIKED, DISLIKED, DISLIKED)
    ]
    preferences = [
        {
            kind: f"\n\nHuman: {question}\n\nAssistant: {answer.format(place)}"
            for kind, answer in (("chosen", LIKED), ("rejected", DISLIKED))
        }
        for question, place in asked
    ]
    for split, copies in (("train", 32), ("test", 4)):
        tasks.write_rows(root / "HuggingFaceH4/no_robots" / f"{split}.jsonl", conversations * copies)
        tasks.write_rows(root / "Anthropic/hh-rlhf" / f"{split}.jsonl", preferences * copies)
    return made


def test_the_policy_learns_to_give_the_answers_that_are_preferred(people: Workspace, stored: Stored) -> None:
    learns = ("sft_learning_rate=3e-3", "rm_learning_rate=5e-3", "max_steps=40", "eval_every=0")
    taught = people.run(RECIPE, NAME, "run_rl=False", *SIZES, *learns)
    options = ("rl_learning_rate=1e-3", "rl_max_tokens=16", "rl_group_size=4", "max_steps=6", "eval_every=6")
    run = people.run(RECIPE, NAME, "run_sft=False", "run_rm=False", *SIZES, *options)
    answers, judge, policy = (stage(run, name) for name in ("sft", "rm", "rl"))
    losses = [each.column("train_mean_nll") for each in (answers, judge)]
    assert all(loss[-1] < 0.2 * loss[0] for loss in losses)
    assert [abs(step) < AGREE for step in divergence(policy)] == [True] * 6
    won = policy.column("win_rate")
    # Against preferred answers: half if all of the policy's answers are of that kind, less if some are not.
    assert won[0] < 0.45
    assert won[-1] > won[0] + 0.05
    assert_final_is_kept(policy, stored)
    run.shows(
        "the losses of both supervised stages fall; sampler and trainer agree; more answers are preferred",
        data=DATA,
        before=[taught.command],
        loss=losses[0],
        loss_of_the_reward_model=losses[1],
        win_rate=won,
        divergence=divergence(policy),
    )


def stage(run: Run, name: str) -> Run:
    """A stage of the pipeline as a run of its own."""
    return replace(run, directory=run.directory.with_name(f"rlhf-{NAME}") / name)


JUDGE = "Qwen/Qwen3.6-35B-A3B"
"""The judge's name, which is also the recipe's default."""


@pytest.fixture(scope="module")
def judge(tools: Workspace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The judge's files."""
    pairs = [(chat_prompt(asked), said) for asked, said in tasks.prompts(tools.root / "lessons" / "judge.jsonl")]
    directory = tmp_path_factory.mktemp("judge") / "model"
    make_judge(pairs, directory)
    return directory


@pytest.fixture(scope="module")
def judged(judge: Path, tools: Workspace, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workspace]:
    """A workspace on a server with a policy, which trains, and a judge. One model is both, under two names."""
    names = (ALIAS, JUDGE)
    flags = ["--base-model", str(judge), *(part for name in names for part in ("--served-model-name", name))]
    python = environment(ROOT / "requirements" / "cookbook.txt")
    root = tmp_path_factory.mktemp("judged")
    with ready(DemoServer(root / "server", *flags)) as server:
        made = Workspace(root / "cookbook", python, server.url, judge, names, serve_command(*names))
        (made.root / "lessons").symlink_to(tools.root / "lessons")
        yield made


def test_a_judge_on_the_same_server_teaches_the_policy_what_it_rewards(judged: Workspace) -> None:
    item = {
        "rubric_str": tasks.RUBRIC,
        "extraction_regex": r"(\d)",
        "grader_output_format_instruction": tasks.GRADES,
    }
    rows = [
        {"convo": [{"role": "user", "content": tasks.question(animal)}], "rubric_items": [item]}
        for animal in tasks.ANIMALS
    ]
    for split, copies in (("train", 8), ("test", 1)):
        tasks.write_rows(judged.root / "rubric" / f"{split}.jsonl", rows * copies)
    lesson = judged.taught("colours", "rubric-lesson", "batch_size=8")
    data = ("train_jsonl_path=rubric/train.jsonl", "test_jsonl_path=rubric/test.jsonl")
    graded = (f"grader_llm_name={JUDGE}", "grader_renderer_name=qwen3_instruct", "renderer_name=qwen3_instruct")
    sizes = ("groups_per_batch=4", "train_group_size=8", "max_tokens=8", "eval_every=0")
    learns = ("loss_fn=cispo", "learning_rate=3e-3", "max_steps=8")
    run = judged.run("rubric.train", "rubric", lesson.as_start, *data, *graded, *sizes, *learns)
    assert [abs(step) < AGREE for step in divergence(run)] == [True] * 8
    score = run.column("env/all/rubric_score")
    assert 0 < score[0] < 0.8
    assert_rises(score, 0.25)
    run.shows(
        "the judge's score rises; sampler and trainer agree",
        data="rows with `convo` and `rubric_items`",
        before=[lesson.command],
        score=score,
        divergence=divergence(run),
    )
