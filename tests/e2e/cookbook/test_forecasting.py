"""The cookbook's forecasts: by reinforcement learning (`forecasting`), and as decisions between two tokens, whose
probabilities the sampler gives and a loss of the recipe's own trains (`decisions`)."""

from __future__ import annotations

import pytest
from transformers import PreTrainedTokenizerBase

from skyrl.base.tiny.corpus import chat_prompt
from skyrl.cli.demo.server import DemoServer

from ..conftest import ALIAS
from . import markets
from .agreement import AGREE, assert_agree, divergence
from .conftest import Stored, assert_final_is_kept
from .workspace import Workspace

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(3000)]

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
