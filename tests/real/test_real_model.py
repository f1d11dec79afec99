"""What holds with really trained weights: sampler, trainer, transformers and PEFT compute the same numbers; a model
learns; a restart changes nothing; OpenAI and Anthropic clients and agent sessions work.

The tests share a server and run in the order of this file; the server's start contains the comparison of vLLM with the
trainer. The last ones start servers of their own.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import anthropic
import httpx
import numpy as np
import openai
import pytest
import tinker
import torch
from peft import PeftModel
from tinker import types
from transformers import AutoModelForCausalLM

from examples.real_model import FACTS, NAME
from skyrl.cli.demo.server import DemoServer
from tests.e2e.conftest import check_two_steps, cross_entropy
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


def test_clients_of_openai_and_anthropic_get_the_greedy_answer(
    server: DemoServer, tokenizer: Any, reference: Any
) -> None:
    question: list[Any] = [{"role": "user", "content": QUESTIONS[0]}]
    opened: Any = openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)
    with opened as one:
        completion = one.chat.completions.create(model=NAME, messages=question, max_tokens=12, temperature=0)
    opened = anthropic.Anthropic(base_url=server.url, api_key=KEY, max_retries=0)
    with opened as other:
        greedy = {"temperature": 0}  # no argument of the newest client
        message = other.messages.create(model=NAME, messages=question, max_tokens=12, extra_body=greedy)
    prompt = chat(tokenizer, QUESTIONS[0])
    with torch.no_grad():
        whole = reference.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)[0, len(prompt) :]
    expected = tokenizer.decode(whole, skip_special_tokens=True)
    assert completion.choices[0].message.content == message.content[0].text == expected


def test_an_agents_session_has_the_tokens_and_logprobs_of_its_turns(server: DemoServer, client: Any) -> None:
    with httpx.Client(base_url=server.url, headers={"X-API-Key": KEY}, trust_env=False, timeout=60) as tenant:
        made = tenant.post("/api/v1/agent_sessions", json={"model": NAME}).json()
        with openai.OpenAI(base_url=f"{made['base_url']}/v1", api_key=made["key"], max_retries=0) as agent:
            messages: list[Any] = [{"role": "user", "content": "Is it warm in Rome? Answer in a few words."}]
            for follow in ("And in Oslo?", None):
                answer = agent.chat.completions.create(model="any", messages=messages, max_tokens=16, temperature=0.7)
                messages.append({"role": "assistant", "content": answer.choices[0].message.content})
                messages += [{"role": "user", "content": follow}] if follow else []
        route = f"/api/v1/agent_sessions/{made['session_id']}"
        turns = tenant.get(f"{route}/turns").json()["rows"]
        rows = tenant.get(f"{route}/trajectory", params={"format": "samples"}).json()["rows"]
    assert [turn["fork"] for turn in turns] == [None, None]
    sampler = client.create_sampling_client(base_model=NAME).result()
    scored = sampler.compute_logprobs(types.ModelInput.from_ints(rows[0]["tokens"])).result()
    sampled = np.flatnonzero(rows[0]["loss_mask"])
    places = len(rows[0]["tokens"]) - len(rows[0]["loss_mask"]) + sampled
    assert len(sampled) == sum(len(turn["sampled_tokens"]) for turn in turns) > 8
    found = np.asarray(rows[0]["rollout_log_probs"])[sampled]
    np.testing.assert_allclose([scored[place] for place in places], found, atol=NEAR)


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
    assert np.mean(rewards[-5:]) > np.mean(rewards[:5]) + 0.1
    assert (tmp_path / "curves.png").stat().st_size > 10_000


@pytest.mark.timeout(1500)
def test_a_restart_in_the_middle_changes_no_bit(directory: Path, tokenizer: Any, tmp_path: Path) -> None:
    tokens = tokenizer.encode(TEXT)

    def steps(trainer: Any, count: int) -> list[float]:
        losses = []
        for _ in range(count):
            passed = trainer.forward_backward([cross_entropy(tokens)], "cross_entropy")
            trainer.optim_step(types.AdamParams(learning_rate=1e-3)).result()
            losses.append(passed.result().metrics["loss:sum"])
        return losses

    server = real_server(directory, tmp_path)
    with ready(server), tinker.ServiceClient(base_url=server.url, api_key=KEY) as client:
        whole = steps(client.create_lora_training_client(base_model=NAME, rank=8, seed=4).result(), 6)
        trainer = client.create_lora_training_client(base_model=NAME, rank=8, seed=4).result()
        halves = steps(trainer, 3)
        server.stop()
        with ready(server):
            halves += steps(trainer, 3)
    assert halves == whole
    assert whole[-1] < whole[0]


@pytest.mark.timeout(1500)
def test_full_finetuning_keeps_sampler_and_trainer_together(directory: Path, tokenizer: Any, tmp_path: Path) -> None:
    tokens = tokenizer.encode(TEXT)
    server = real_server(directory, tmp_path, **{"trainer.policy.model.lora.rank": 0})
    with ready(server), tinker.ServiceClient(base_url=server.url, api_key=KEY) as client:
        trainer = client.create_lora_training_client(base_model=NAME, rank=0).result()
        check_two_steps(trainer, tokens, types.AdamParams(learning_rate=2e-5), NEAR)


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
