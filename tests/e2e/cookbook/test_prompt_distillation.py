"""The cookbook's recipe that teaches a model an answer without the long prompt by which a teacher gives it."""

from __future__ import annotations

import pytest
import tinker
from transformers import PreTrainedTokenizerBase

from skyrl.base.tiny.corpus import IM_END, chat_prompt
from skyrl.cli.demo.server import DemoServer

from ..conftest import greedy
from . import tasks
from .agreement import assert_agree
from .conftest import Stored, assert_final_is_kept
from .workspace import KEY, Workspace

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(3000)]


def test_the_student_names_a_language_without_the_teachers_prompt(
    workspace: Workspace, server: DemoServer, tokenizer: PreTrainedTokenizerBase, stored: Stored
) -> None:
    """The data is what the recipe's `create_data` writes: sentences, and the labels that a teacher gave them."""
    rows = [
        {"messages": [{"role": "user", "content": sentence}, {"role": "assistant", "content": label}]}
        for label, sentences in tasks.SENTENCES.items()
        for sentence in sentences
    ]
    tasks.write_rows(workspace.root / "languages.jsonl", rows * 10)
    options = ("file_path=languages.jsonl", "batch_size=8", "learning_rate=1e-2", "num_epochs=2", "eval_every=0")
    run = workspace.run("prompt_distillation.train", "prompt-distillation", *options)
    loss = run.column("train_mean_nll")
    assert loss[-1] < 0.2 * loss[0]
    with tinker.ServiceClient(base_url=server.url, api_key=KEY) as client:
        student = client.create_sampling_client(model_path=run.checkpoints[-1]["sampler_path"]).result()
        for label, sentences in tasks.SENTENCES.items():
            answer = greedy(student, tokenizer.encode(chat_prompt(sentences[0])))
            wanted = tokenizer.encode(f"{label}{IM_END}")
            assert answer[: len(wanted)] == wanted
    text = chat_prompt(tasks.SENTENCES["el"][0]) + "el"
    apart = assert_agree(run, server.url, tokenizer.encode(text))
    assert_final_is_kept(run, stored)
    run.shows(
        "the model gives the teacher's answer without its prompt; the final sampler and trainer agree",
        data="rows with `messages`, as `prompt_distillation.create_data` writes them",
        loss=loss,
        difference=[apart],
    )
