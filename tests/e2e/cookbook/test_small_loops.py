"""The cookbook's small recipes of supervised training, with the data set that they name."""

from __future__ import annotations

import pytest
from transformers import PreTrainedTokenizerBase

from skyrl.base.tiny.corpus import chat_prompt
from skyrl.cli.demo.server import DemoServer

from . import tasks
from .agreement import assert_agree
from .conftest import Stored, assert_final_is_kept
from .workspace import Run, Workspace

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(3000)]

DATA = "`HuggingFaceH4/no_robots`: rows with `messages`"


@pytest.fixture(scope="module")
def conversations(workspace: Workspace) -> Workspace:
    """With 640 conversations: five batches of `sl_basic`, which has no option for their size."""
    rows = [
        {
            "messages": [
                {"role": "user", "content": tasks.question(animal)},
                {"role": "assistant", "content": tasks.statement(animal)},
            ]
        }
        for animal in tasks.ANIMALS
    ]
    for split, copies in (("train", 80), ("test", 1)):
        tasks.write_rows(workspace.root / "HuggingFaceH4" / "no_robots" / f"{split}.jsonl", rows * copies)
    return workspace


def check(run: Run, url: str, tokenizer: PreTrainedTokenizerBase, stored: Stored) -> None:
    loss = run.column("train_mean_nll")
    assert loss[-1] < 0.5 * loss[0]
    text = chat_prompt(tasks.question("fox")) + tasks.statement("fox")
    apart = assert_agree(run, url, tokenizer.encode(text))
    assert_final_is_kept(run, stored)
    run.shows("the loss falls; the final sampler and trainer agree", data=DATA, loss=loss, difference=[apart])


def test_sl_basic_lowers_the_loss(
    conversations: Workspace, server: DemoServer, tokenizer: PreTrainedTokenizerBase, stored: Stored
) -> None:
    run = conversations.run("sl_basic", "sl-basic", "learning_rate=1e-2", "eval_every=0")
    assert len(run.column("train_mean_nll")) == 5
    check(run, server.url, tokenizer, stored)


def test_sl_loop_lowers_the_loss(
    conversations: Workspace, server: DemoServer, tokenizer: PreTrainedTokenizerBase, stored: Stored
) -> None:
    options = ("batch_size=8", "max_length=256", "learning_rate=1e-2", "max_steps=8")
    check(conversations.run("sl_loop", "sl-loop", *options), server.url, tokenizer, stored)
