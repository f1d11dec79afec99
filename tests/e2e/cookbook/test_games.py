"""The cookbook's games between players and its forecasts."""

from __future__ import annotations

import json
import shutil

import pytest
from transformers import PreTrainedTokenizerBase

from skyrl.base.tiny.corpus import IM_END, IM_START, chat_prompt
from skyrl.cli.demo.server import DemoServer

from ..conftest import ALIAS, ClientFactory
from . import markets
from .agreement import AGREE, assert_agree, divergence, logprob
from .conftest import Stored, assert_final_is_kept
from .workspace import KEY, Run, Workspace

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(3000)]

RESUMES = ("behavior_if_log_dir_exists=resume", "renderer_name=qwen3_instruct", "eval_every=0")
SECRET = "garden"
"""The first word in the recipe's list."""


def begin(workspace: Workspace, recipe: str, *options: str) -> tuple[Run, str]:
    """Teach the model the recipe's lesson. The run, and the command after which `runs/<recipe>` goes on from there."""
    workspace.program("tests.e2e.cookbook.beginnings", ALIAS, recipe)
    lesson = workspace.taught(recipe, f"{recipe}-lesson", "batch_size=4", "max_length=2048", *options)
    shutil.copytree(lesson.directory, workspace.root / "runs" / recipe)
    return lesson, f"cp -r runs/{recipe}-lesson runs/{recipe}"


def test_players_against_themselves_learn_to_make_legal_moves(tools: Workspace, stored: Stored) -> None:
    lesson, copied = begin(tools, "text_arena", "max_steps=24")
    sizes = ("batch_size=32", "num_train_datapoints=192", "num_test_datapoints=2", "test_opponent=random")
    learns = ("max_tokens=8", "learning_rate=3e-3", "max_steps=6")
    run = tools.run("multiplayer_rl.text_arena.train", "text_arena", *RESUMES, *sizes, *learns)
    assert [abs(step) < AGREE for step in divergence(run)] == [True] * 6
    # A game ends with the first illegal move.
    turns = run.column("env/all/turns_per_episode")
    assert max(turns[-2:]) > turns[0] + 0.2
    assert_final_is_kept(run, stored)
    run.shows(
        "sampler and trainer agree; games take more turns, because moves are legal",
        before=[lesson.command, copied],
        turns=turns,
        divergence=divergence(run),
    )


def test_the_word_that_ended_games_becomes_likelier(
    two_models: Workspace, connect: ClientFactory, tokenizer: PreTrainedTokenizerBase, stored: Stored
) -> None:
    lesson, copied = begin(two_models, "twenty_questions", "max_steps=32")
    options = ("batch_size=1", "group_size=32", "max_tokens=8", "learning_rate=5e-3", "max_steps=1")
    run = two_models.run("multiplayer_rl.twenty_questions.train", "twenty_questions", *RESUMES, *options)
    (apart,) = divergence(run)
    assert abs(apart) < AGREE
    (won,), (turns,) = run.column("env/all/reward/total"), run.column("env/all/turns_per_episode")
    assert 0 < won < 1 < turns < 20
    first = (two_models.root / "lessons" / "twenty_questions.jsonl").read_text().splitlines()[0]
    rules = json.loads(first)["messages"][0]["content"]
    prompt = f"{IM_START}system\n{rules}{IM_END}\n{IM_START}assistant\nGuess:"
    tokens, word = tokenizer.encode(prompt), tokenizer.encode(f" {SECRET}")
    service = connect(KEY)
    players = [
        service.create_sampling_client(model_path=each.checkpoints[-1]["sampler_path"]) for each in (lesson, run)
    ]
    before, after = (logprob(player.result(), tokens, word) for player in players)
    assert after > before + 0.1
    assert_final_is_kept(run, stored)
    run.shows(
        "sampler and trainer agree over twenty turns; the word that ended games becomes likelier",
        before=[lesson.command, copied],
        logprob_of_the_word=[before, after],
        divergence=[apart],
    )


DATA = f"`{markets.FILE}`: the columns of Prophet Arena"
GIVEN = (f"data_path={markets.FILE}", "renderer_name=qwen3_instruct")


@pytest.fixture(scope="module")
def oracle(workspace: Workspace) -> Workspace:
    """With markets."""
    markets.write(workspace.root)
    return workspace


def test_forecasts_earn_more_after_training(oracle: Workspace, stored: Stored) -> None:
    oracle.program("tests.e2e.cookbook.beginnings", ALIAS, "forecasting")
    lesson = oracle.taught("forecasting", "forecasting-lesson", "batch_size=4", "max_length=1024", "max_steps=16")
    sizes = ("groups_per_batch=4", "group_size=8", "validation_group_size=2", "max_tokens=8")
    learns = ("learning_rate=3e-3", "max_steps=5", "eval_every=5")
    run = oracle.run("forecasting.train", "forecasting", *GIVEN, *sizes, *learns, lesson.as_start)
    assert [abs(step) < AGREE for step in divergence(run)] == [True] * 5
    reward, scored = run.column("env/all/reward/total"), run.column("test/env/all/brier_reward")
    assert reward[-1] > reward[0] + 0.1
    assert scored[-1] > scored[0] + 0.1
    assert_final_is_kept(run, stored)
    run.shows(
        "sampler and trainer agree; the Brier reward rises, also of markets that open later",
        data=DATA,
        before=[lesson.command],
        reward=reward,
        later_markets=scored,
        divergence=divergence(run),
    )


def test_decisions_come_true_after_training(
    oracle: Workspace, server: DemoServer, tokenizer: PreTrainedTokenizerBase, stored: Stored
) -> None:
    learns = ("batch_size=8", "learning_rate=3e-3", "max_steps=8", "eval_every=0")
    run = oracle.run("decisions.forecasting", "decisions", *GIVEN, *learns)
    reward, right = run.column("test/brier_reward"), run.column("test/accuracy")
    assert reward[-1] > reward[0] + 0.1
    assert right[-1] > max(0.8, right[0])
    apart = assert_agree(run, server.url, tokenizer.encode(chat_prompt("Will the fox come?") + "choice#Y"))
    assert_final_is_kept(run, stored)
    run.shows(
        "the Brier reward rises; the final sampler and trainer agree",
        data=DATA,
        reward=reward,
        right=right,
        difference=[apart],
    )
