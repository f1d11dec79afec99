"""What holds with really trained weights: sampler, trainer, transformers and PEFT compute the same numbers; a model
learns facts and sums; clients of OpenAI and Anthropic get transformers' answers; a restart changes no bit.

The tests share a server, whose start contains the comparison of vLLM with the trainer. The last ones restart it.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import anthropic
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
from tests.real.conftest import EXAMPLE, KEY, NEAR, TEXT, all_logprobs, chat, greedy, logprobs_of
from tests.sdk_programs import TRACED, succeeded
from tests.servers import SLOW_START_S

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

QUESTIONS = [
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "Name three animals that can fly.",
    "What is 7 + 5?",
]


def test_the_start_has_compared_vllm_with_the_trainer(server: DemoServer) -> None:
    log = (server.state_dir / "logs" / "engine.log").read_text()
    found = re.search(r"at most (\S+) apart, and of the changes by (\d+) adapters at least ([\d.]+)% is the same", log)
    assert found is not None
    assert 0 < float(found[1]) < NEAR
    assert int(found[2]) == 9, "seven matrices of a layer, the output layer, all of them"
    assert float(found[3]) > 99.5


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


@pytest.mark.parametrize("question", QUESTIONS[:2])
def test_clients_get_the_greedy_answer(server: DemoServer, tokenizer: Any, reference: Any, question: str) -> None:
    """Of transformers: the first answer ends by itself, the second is cut."""
    prompt = chat(tokenizer, question)
    sampled = greedy(reference, prompt, 16)
    expected = tokenizer.decode(sampled, skip_special_tokens=True)
    is_cut = sampled[-1] != tokenizer.eos_token_id
    assert is_cut == (question == QUESTIONS[1])
    messages: list[Any] = [{"role": "user", "content": question}]
    asked: dict[str, Any] = {"model": NAME, "messages": messages, "max_tokens": 16}
    opened: Any = openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)
    with opened as client:
        whole = client.chat.completions.create(**asked, temperature=0)
        parts = [
            *client.chat.completions.create(**asked, temperature=0, stream=True, stream_options={"include_usage": True})
        ]
    choice, ends = whole.choices[0], [part.choices[0].finish_reason for part in parts if part.choices]
    assert choice.message.content == expected
    assert "".join(part.choices[0].delta.content or "" for part in parts if part.choices) == expected
    assert choice.finish_reason == ends[-1] == ("length" if is_cut else "stop")
    for usage in (whole.usage, parts[-1].usage):
        assert (usage.prompt_tokens, usage.completion_tokens) == (len(prompt), len(sampled))
    opened = anthropic.Anthropic(base_url=server.url, api_key=KEY, max_retries=0)
    with opened as client:
        zero: dict[str, Any] = {"extra_body": {"temperature": 0}}  # no argument of the newest client
        message = client.messages.create(**asked, **zero)
        with client.messages.stream(**asked, **zero) as stream:
            texts = [*stream.text_stream]
            last = stream.get_final_message()
    assert message.content[0].text == last.content[0].text == "".join(texts) == expected
    assert message.stop_reason == last.stop_reason == ("max_tokens" if is_cut else "end_turn")
    for usage in (message.usage, last.usage):
        assert usage.input_tokens + usage.cache_read_input_tokens == len(prompt)
        assert usage.output_tokens == len(sampled)


def test_an_export_is_the_same_model_in_peft(
    server: DemoServer, client: Any, tokenizer: Any, reference: Any, directory: Path, tmp_path: Path
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
    answer = greedy(adapted, chat(tokenizer, QUESTIONS[1]), 16)
    assert answer != greedy(reference, chat(tokenizer, QUESTIONS[1]), 16)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as opened:
        messages: list[Any] = [{"role": "user", "content": QUESTIONS[1]}]
        said = opened.chat.completions.create(model=path, messages=messages, max_tokens=16, temperature=0)
    assert said.choices[0].message.content == tokenizer.decode(answer, skip_special_tokens=True)


@pytest.mark.timeout(1500)
def test_the_example_learns_facts_and_sums(server: DemoServer, tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLE), "--base-url", server.url, "--out", str(tmp_path)]
    model = tmp_path / NAME
    model.symlink_to(EXAMPLE.parents[1] / "out" / "real-model" / NAME)
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False, env=os.environ | TRACED)
    assert succeeded(done.returncode, done.stderr), done.stderr
    losses = [float(loss) for loss in re.findall(r"loss per token ([\d.]+)", done.stdout)]
    known = re.search(r"known word by word: (\d+) of", done.stdout)
    assert losses[0] > 2.0 > 0.1 > losses[-1]
    assert known is not None
    assert int(known[1]) >= 0.9 * FACTS
    rewards = [float(reward) for reward in re.findall(r"reward ([\d.]+)", done.stdout)]
    assert len(rewards) == 20
    assert np.mean(rewards[-5:]) > np.mean(rewards[:5]) + 0.3
    assert (tmp_path / "curves.png").stat().st_size > 10_000


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL], ids=["stopped", "killed"])
def test_a_restart_in_the_middle_changes_no_bit(
    server: DemoServer, client: Any, tokenizer: Any, end: signal.Signals
) -> None:
    """The same client goes on: it waits while the server is away."""
    tokens = tokenizer.encode(TEXT)

    def steps(trainer: Any, count: int) -> list[float]:
        losses = []
        for _ in range(count):
            passed = trainer.forward_backward([cross_entropy(tokens)], "cross_entropy")
            trainer.optim_step(types.AdamParams(learning_rate=1e-3)).result()
            losses.append(passed.result().metrics["loss:sum"])
        return losses

    def new() -> Any:
        return client.create_lora_training_client(base_model=NAME, rank=8, seed=4).result()

    whole = steps(new(), 6)
    trainer = new()
    halves = steps(trainer, 3)
    os.kill(server.pid, end)
    server.stop()
    server.start()
    server.wait_ready(SLOW_START_S)
    halves += steps(trainer, 3)
    assert halves == whole
    assert whole[-1] < 0.9 * whole[0]
