"""The cookbook's three stages of learning from human feedback: supervised training, a reward model, and reinforcement
learning with its rewards.

The supervised stage learns two kinds of answers. The rarer one is preferred.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from skyrl.base.tiny import model_path
from skyrl.cli.demo.server import DemoServer
from tests.environments import ROOT, environment

from . import tasks
from .agreement import AGREE, divergence
from .conftest import Stored, assert_final_is_kept
from .workspace import PLACES, QUESTIONS, Run, Workspace

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
