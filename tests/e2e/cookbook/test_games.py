"""The cookbook's games between players: against oneself (`text_arena`), and with another model that answers.

The model has learned the form of a move or of a guess. Neither recipe can load a checkpoint, but each goes on from the
one that its directory names.
"""

from __future__ import annotations

import json
import shutil

import pytest
from transformers import PreTrainedTokenizerBase

from skyrl.base.tiny.corpus import IM_END, IM_START

from ..conftest import ALIAS, ClientFactory
from .agreement import AGREE, divergence
from .conftest import Stored, assert_final_is_kept
from .likelihood import logprob
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
