"""What holds with really trained weights: sampler, trainer, transformers and PEFT compute the same numbers; a model
learns facts; a token without a row is refused.

The tests share a server, whose start contains the comparison of vLLM with the trainer. The last one has its own.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
from peft import PeftModel
from tinker import types
from transformers import AutoModelForCausalLM

from examples.real_model import FACTS, NAME
from skyrl.cli.demo.server import DemoServer
from tests.e2e.conftest import cross_entropy
from tests.e2e.test_checkpoints import archive_of
from tests.real.conftest import EXAMPLE, KEY, all_logprobs, chat, logprobs_of, real_server
from tests.sdk_programs import TRACED
from tests.servers import ready

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

TEXT = (
    "The river rises in the hills north of the town. In spring, melting snow fills it within days, and the old mill, "
    "built in 1842, stands with its feet in the water. Nobody has lived there since the war."
)
QUESTIONS = [
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "Name three animals that can fly.",
    "What is 7 + 5?",
]
NEAR = 5e-4
"""Nats. Logits of this model are up to 30, so float32 rounds them to 2e-6 at best; sums of 576 terms in another order
moved logprobs by up to 4e-5 here."""


def test_greedy_answers_are_those_of_transformers(client: Any, tokenizer: Any, reference: Any) -> None:
    sampler = client.create_sampling_client(base_model=NAME).result()
    params = types.SamplingParams(max_tokens=20, temperature=0.0)
    prompts = [chat(tokenizer, question) for question in QUESTIONS]
    asked = [sampler.sample(types.ModelInput.from_ints(prompt), 1, params) for prompt in prompts]
    compared = 0
    for prompt, future in zip(prompts, asked, strict=True):
        sequence = future.result().sequences[0]
        rows = all_logprobs(reference, [*prompt, *sequence.tokens])[len(prompt) - 1 :]
        for row, token, logprob in zip(rows, sequence.tokens, sequence.logprobs, strict=True):
            best, second = row.topk(2).values
            assert float(row[token]) == pytest.approx(logprob, abs=NEAR)
            if float(best - second) > NEAR:
                assert int(row.argmax()) == token
                compared += 1
    assert compared > 40
    assert "Paris" in tokenizer.decode(asked[0].result().sequences[0].tokens)


def test_the_sampler_the_trainer_and_transformers_agree(client: Any, tokenizer: Any, reference: Any) -> None:
    tokens = tokenizer.encode(TEXT)
    expected = logprobs_of(reference, tokens)
    assert 2.0 < -expected.mean() < 4.5, "trained weights, in nats a token of plain English"
    sampler = client.create_sampling_client(base_model=NAME).result()
    sampled = np.asarray(sampler.compute_logprobs(types.ModelInput.from_ints(tokens)).result()[1:], np.float64)
    trainer = client.create_lora_training_client(base_model=NAME, rank=8, seed=1).result()
    trained = trainer.forward([cross_entropy(tokens)], "cross_entropy").result().loss_fn_outputs[0]["logprobs"]
    assert np.abs(sampled - expected).max() < NEAR
    assert np.abs(trained.to_numpy() - expected).max() < NEAR


def test_an_export_is_the_same_model_in_peft(
    server: DemoServer, client: Any, tokenizer: Any, directory: Path, tmp_path: Path
) -> None:
    tokens = tokenizer.encode(TEXT)
    options = {"rank": 8, "seed": 1, "train_unembed": False}
    trainer = client.create_lora_training_client(base_model=NAME, **options).result()
    for _ in range(3):
        trainer.forward_backward([cross_entropy(tokens)], "cross_entropy")
        trainer.optim_step(types.AdamParams(learning_rate=1e-3)).result()
    path = trainer.save_weights_for_sampler(name="export").result().path
    sampler = client.create_sampling_client(model_path=path).result()
    sampled = np.asarray(sampler.compute_logprobs(types.ModelInput.from_ints(tokens)).result()[1:], np.float64)
    base = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    before = logprobs_of(base, tokens)
    adapter = archive_of(server, path, tmp_path, KEY)
    adapted = PeftModel.from_pretrained(base, str(adapter)).eval()
    assert np.abs(sampled - before).max() > 0.3
    assert np.abs(logprobs_of(adapted, tokens) - sampled).max() < NEAR


def test_the_example_learns_facts_and_sums(server: DemoServer, tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLE), "--base-url", server.url, "--out", str(tmp_path)]
    model = tmp_path / NAME
    model.symlink_to(EXAMPLE.parents[1] / "out" / "real-model" / NAME)
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500, check=False, env=os.environ | TRACED)
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"loss per token ([\d.]+)", done.stdout)]
    known = re.search(r"known word by word: (\d+) of", done.stdout)
    assert losses[0] > 2.0 > 0.1 > losses[-1]
    assert known is not None
    assert int(known[1]) >= 0.9 * FACTS
    rewards = [float(reward) for reward in re.findall(r"reward ([\d.]+)", done.stdout)]
    assert len(rewards) == 20
    assert all(0 <= reward <= 1 for reward in rewards)
    assert (tmp_path / "curves.png").stat().st_size > 10_000


@pytest.mark.timeout(1500)
def test_a_token_beyond_the_models_rows_is_refused_and_harms_nobody(directory: Path, tmp_path: Path) -> None:
    changed = tmp_path / "model"
    changed.mkdir()
    for file in directory.iterdir():
        if file.name != "tokenizer.json":
            (changed / file.name).symlink_to(file)
    held = json.loads((directory / "tokenizer.json").read_text())
    rows = json.loads((directory / "config.json").read_text())["vocab_size"]
    held["added_tokens"].append({**held["added_tokens"][0], "id": rows, "content": "<beyond>"})
    (changed / "tokenizer.json").write_text(json.dumps(held))
    server = real_server(changed, tmp_path / "state")
    with ready(server), openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as client:
        asked: dict[str, Any] = {"model": NAME, "max_tokens": 4, "temperature": 0}
        with pytest.raises(openai.BadRequestError, match=f"{rows}"):
            client.chat.completions.create(messages=[{"role": "user", "content": "<beyond>"}], **asked)
        assert client.chat.completions.create(messages=[{"role": "user", "content": "Hello"}], **asked).choices
    assert "has 1 token beyond the model's 49,152 rows" in (tmp_path / "state" / "serve.log").read_text()
